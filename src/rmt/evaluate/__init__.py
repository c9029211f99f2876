"""How good a trained model is: its loss on held-out tokens, perplexities, downstream tasks."""
