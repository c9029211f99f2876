"""One question about the Hugging Face hub, asked before its libraries spend half a minute on retries: is it there?"""

import urllib.error
import urllib.request

from rmt.errors import InputError

PATIENCE = 10.0  # seconds


def require_hub(what: str, advice: str) -> None:
    """Raise `InputError` ("what, and the hub cannot be reached: advice") unless the hub answers."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise InputError(f"{what}, and HF_HUB_OFFLINE forbids asking the Hugging Face hub: {advice}")
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=PATIENCE).close()
    except urllib.error.HTTPError as error:
        error.close()  # it answered: that is all we asked
    except OSError as error:
        raise InputError(f"{what}, and the Hugging Face hub cannot be reached (no network?): {advice}") from error
