"""Laws that say how loss falls with what is spent: robust fits with intervals. The same input gives the same bits.

A law is a sum of an irreducible loss and of power terms,

    L = E + A / N^a + B / D^b        loss of N parameters and D tokens
    L = E + A / C^a                  loss of C FLOPs
    L = A / C^a                      the same without a floor: a straight line on logarithmic axes

and is fitted as in Hoffmann et al. (2022): the Huber loss of log L is minimised from many starting points. Writing each
term as an exponential makes log L a log-sum-exp, whose derivatives are the terms' shares; all starts, and all resamples
of a bootstrap, are then minimised at once by damped Gauss-Newton steps on arrays.

Intervals come from a residual bootstrap: the fitted losses plus residuals drawn anew (widened for the degrees of
freedom that the fit has used up) are fitted again, many times.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DELTA = 1e-3  # of the Huber loss, on log L: larger residuals count linearly
ITERATIONS = 300
REFINEMENTS = 60  # of a fit that starts near its minimum
RESAMPLES = 500
LARGEST_EXPONENT = 2.0
TAIL = (2.5, 97.5)  # percentiles of a 95 % interval
SMALL = 1e-12

# Axes: B fits at once, N runs, P parameters, V variables, T terms.


@dataclass(frozen=True)
class Law:
    """A fitted law.

    Args:
        floor: the irreducible loss E, or 0 if the law has none.
        scales: A, B, ... per variable.
        exponents: a, b, ... per variable.
        error: root mean square of the residuals of log L.
    """

    floor: float
    scales: tuple[float, ...]
    exponents: tuple[float, ...]
    error: float = 0.0

    def loss(self, *values: np.ndarray | float) -> np.ndarray:
        """At given values of the variables."""
        terms = zip(self.scales, self.exponents, values, strict=True)
        return self.floor + sum(scale * np.asarray(value, float) ** -power for scale, power, value in terms)  # type: ignore[return-value]

    def needed(self, loss: float) -> float:
        """The value of the one variable at which the loss is reached; infinite below the floor."""
        if loss <= self.floor or self.exponents[0] <= SMALL:
            return float("inf")
        return float((self.scales[0] / (loss - self.floor)) ** (1 / self.exponents[0]))


def fit(variables: Sequence[Sequence[float]], losses: Sequence[float], *, floor: bool = True) -> Law:
    """The law with a term per variable that fits the losses best.

    Args:
        variables: for each variable, its value in each run.
        losses: of the runs.
        floor: with an irreducible loss.
    """
    log_x_VN, log_y_N = np.log(np.asarray(variables, float)), np.log(np.asarray(losses, float))
    start_BP = starts(log_x_VN, log_y_N, floor)
    found_BP, cost_B = minimise(start_BP, log_x_VN, np.broadcast_to(log_y_N, (len(start_BP), len(log_y_N))), floor)
    return unpack(found_BP[int(np.argmin(cost_B))], log_x_VN, log_y_N, floor)


def bootstrap(
    law: Law,
    variables: Sequence[Sequence[float]],
    losses: Sequence[float],
    resamples: int = RESAMPLES,
) -> list[Law]:
    """Fits to resampled losses, with a floor if `law` has one.

    The n-th resample draws the same positions each time. Two laws whose runs stand in the same order are so resampled
    in pairs: what mirrored runs have in common (their data, their batch, the shape of their rung) stays in common.
    """
    floor = law.floor > 0
    log_x_VN, log_y_N = np.log(np.asarray(variables, float)), np.log(np.asarray(losses, float))
    fitted_N = np.log(law.loss(*np.exp(log_x_VN)))
    residual_N = log_y_N - fitted_N
    used = 2 * len(log_x_VN) + floor
    widen = np.sqrt(len(log_y_N) / max(1, len(log_y_N) - used))
    rng = np.random.default_rng(0)
    log_y_BN = fitted_N + widen * rng.choice(residual_N - residual_N.mean(), (resamples, len(log_y_N)))
    start_BP = np.tile(pack(law, floor), (resamples, 1))
    found_BP, _ = minimise(start_BP, log_x_VN, log_y_BN, floor, REFINEMENTS)
    return [unpack(found, log_x_VN, log_y, floor) for found, log_y in zip(found_BP, log_y_BN, strict=True)]


def interval(values: Sequence[float]) -> list[float]:
    """The 95 % interval of resampled values."""
    low, high = np.percentile(np.nan_to_num(np.asarray(values, float), posinf=1e300), TAIL)
    return [float(low), float(high)]


def starts(log_x_VN: np.ndarray, log_y_N: np.ndarray, floor: bool) -> np.ndarray:
    """Starting points: exponents on a grid, the floor at shares of the lowest loss, scales that meet the mean loss."""
    floors = [0.2, 0.5, 0.8] if floor else [0.0]
    powers = itertools.product((0.05, 0.2, 0.5, 1.0), repeat=len(log_x_VN))
    points = []
    for share, exponents in itertools.product(floors, powers):
        rest = np.log((np.exp(log_y_N) - share * np.exp(log_y_N.min())).mean() / len(log_x_VN))
        terms = [(rest + power * x.mean(), power) for power, x in zip(exponents, log_x_VN, strict=True)]
        points.append(([np.log(share) + log_y_N.min()] if floor else []) + [value for term in terms for value in term])
    return np.array(points)


def minimise(
    start_BP: np.ndarray, log_x_VN: np.ndarray, log_y_BN: np.ndarray, floor: bool, iterations: int = ITERATIONS
) -> tuple[np.ndarray, np.ndarray]:
    """Damped Gauss-Newton steps on the Huber loss from each start; returns the parameters and their costs."""
    params_BP, damping_B = start_BP.copy(), np.full(len(start_BP), 1e-2)
    residual_BN, jacobian_BNP = evaluate(params_BP, log_x_VN, log_y_BN, floor)
    cost_B = huber(residual_BN)
    for _ in range(iterations):
        weight_BN = DELTA / np.maximum(np.abs(residual_BN), DELTA)
        weighted_BNP = weight_BN[..., None] * jacobian_BNP
        normal_BPP = np.einsum("bnp,bnq->bpq", weighted_BNP, jacobian_BNP)
        gradient_BP = np.einsum("bnp,bn->bp", weighted_BNP, residual_BN)
        diagonal_BP = np.einsum("bpp->bp", normal_BPP)
        shift_BP = damping_B[:, None] * (diagonal_BP + 1e-9) + SMALL
        damped_BPP = normal_BPP + shift_BP[:, :, None] * np.eye(params_BP.shape[1])
        step_BP = np.linalg.solve(damped_BPP, gradient_BP[..., None])[..., 0]
        trial_BP = bounded(params_BP - step_BP, floor)
        trial_residual_BN, trial_jacobian_BNP = evaluate(trial_BP, log_x_VN, log_y_BN, floor)
        trial_cost_B = huber(trial_residual_BN)
        is_better_B = trial_cost_B < cost_B
        params_BP[is_better_B], cost_B[is_better_B] = trial_BP[is_better_B], trial_cost_B[is_better_B]
        residual_BN[is_better_B] = trial_residual_BN[is_better_B]
        jacobian_BNP[is_better_B] = trial_jacobian_BNP[is_better_B]
        damping_B = np.clip(np.where(is_better_B, damping_B / 3, damping_B * 4), 1e-9, 1e9)
    return params_BP, cost_B


def evaluate(
    params_BP: np.ndarray, log_x_VN: np.ndarray, log_y_BN: np.ndarray, floor: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Residuals of log L, predicted minus given, and their derivatives with respect to the parameters."""
    variables, runs = log_x_VN.shape
    scale_BV, power_BV = params_BP[:, int(floor) :: 2], params_BP[:, int(floor) + 1 :: 2]
    term_BTN = scale_BV[..., None] - power_BV[..., None] * log_x_VN
    if floor:
        constant = np.broadcast_to(params_BP[:, :1, None], (len(params_BP), 1, runs))
        term_BTN = np.concatenate([constant, term_BTN], axis=1)
    top = term_BTN.max(axis=1, keepdims=True)
    share_BTN = np.exp(term_BTN - top)
    total_BN = share_BTN.sum(axis=1)
    share_BTN /= total_BN[:, None]
    jacobian_BPN = np.empty((*params_BP.shape, runs))
    if floor:
        jacobian_BPN[:, 0] = share_BTN[:, 0]
    jacobian_BPN[:, int(floor) :: 2] = share_BTN[:, int(floor) :]
    jacobian_BPN[:, int(floor) + 1 :: 2] = -share_BTN[:, int(floor) :] * log_x_VN
    assert variables == scale_BV.shape[1]
    return np.log(total_BN) + top[:, 0] - log_y_BN, jacobian_BPN.transpose(0, 2, 1)


def huber(residual_BN: np.ndarray) -> np.ndarray:
    size = np.abs(residual_BN)
    return np.where(size <= DELTA, 0.5 * size**2, DELTA * (size - 0.5 * DELTA)).sum(axis=1)


def bounded(params_BP: np.ndarray, floor: bool) -> np.ndarray:
    """Exponents between 0 and their largest: more data or parameters never hurt, and no law is that steep."""
    bounded_BP = params_BP.copy()
    bounded_BP[:, int(floor) + 1 :: 2] = np.clip(params_BP[:, int(floor) + 1 :: 2], 0.0, LARGEST_EXPONENT)
    return np.clip(bounded_BP, -100.0, 100.0)


def pack(law: Law, floor: bool) -> np.ndarray:
    head = [np.log(max(law.floor, SMALL))] if floor else []
    return np.array([*head, *(v for a, b in zip(law.scales, law.exponents, strict=True) for v in (np.log(a), b))])


def unpack(params_P: np.ndarray, log_x_VN: np.ndarray, log_y_N: np.ndarray, floor: bool) -> Law:
    residual_BN, _ = evaluate(params_P[None], log_x_VN, log_y_N[None], floor)
    return Law(
        floor=float(np.exp(params_P[0])) if floor else 0.0,
        scales=tuple(float(value) for value in np.exp(params_P[int(floor) :: 2])),
        exponents=tuple(float(value) for value in params_P[int(floor) + 1 :: 2]),
        error=float(np.sqrt(np.mean(residual_BN**2))),
    )
