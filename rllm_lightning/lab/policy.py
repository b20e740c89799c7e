"""A policy small enough to write down: softmax logits for every prefix, every sequence listed, no sampling.

    logits_SV  ->  every sequence y, its probability, its tokens' scores  ->  Prompt (policy + a reward for every y)

Token 0 ends a sequence; so does reaching `max_length`. A *score* is the gradient of a log-probability by the flattened logits.
Prompts do not share logits, so the gradient of several prompts is their gradients one after the other.

Shapes: S prefixes, V tokens, D = S·V logits, Y sequences, T tokens of one sequence. Everything is float64 and free of torch.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

END = 0
Sequence = tuple[int, ...]


class TabularPolicy:
    """Softmax over the next token with free logits for every prefix.

    Args:
        logits_SV: one row a prefix, in the order of `prefixes(V, max_length)`.
        max_length: tokens of the longest sequence.

    Raises:
        ValueError: the number of rows is not the number of prefixes.
    """

    def __init__(self, logits_SV: np.ndarray, max_length: int):
        self.logits_SV = np.asarray(logits_SV, dtype=np.float64)
        self.max_length = max_length
        self.vocab_size = self.logits_SV.shape[1]
        self.prefixes = prefixes(self.vocab_size, max_length)
        if len(self.logits_SV) != len(self.prefixes):
            raise ValueError(f"logits_SV: {len(self.logits_SV)} rows for {len(self.prefixes)} prefixes of max_length {max_length}")
        self.sequences = sequences(self.vocab_size, max_length)
        self._row = {prefix: row for row, prefix in enumerate(self.prefixes)}

    @classmethod
    def from_probabilities(cls, probs_Y: np.ndarray, vocab_size: int, max_length: int) -> TabularPolicy:
        """The policy that gives sequence y the probability `probs_Y[y] / sum(probs_Y)`, in the order of `sequences`.

        Raises:
            ValueError: a probability is not above 0 (a logit would be infinite), or their number does not fit.
        """
        listed = sequences(vocab_size, max_length)
        if len(probs_Y) != len(listed) or not np.all(np.asarray(probs_Y) > 0):
            raise ValueError(f"probs_Y: expected {len(listed)} numbers above 0, got {list(probs_Y)}")
        mass = {
            prefix: sum(p for p, y in zip(probs_Y, listed, strict=True) if y[: len(prefix)] == prefix)
            for prefix in {y[:t] for y in listed for t in range(len(y) + 1)}
        }
        rows = [[np.log(mass[(*prefix, token)]) for token in range(vocab_size)] for prefix in prefixes(vocab_size, max_length)]
        return cls(np.array(rows), max_length)

    @cached_property
    def next_token_probs_SV(self) -> np.ndarray:
        exp_SV = np.exp(self.logits_SV - self.logits_SV.max(axis=1, keepdims=True))
        return exp_SV / exp_SV.sum(axis=1, keepdims=True)

    def token_logprobs(self, sequence: Sequence) -> np.ndarray:
        """Log-probability of each token of `sequence`, shape [T]."""
        rows = [self._row[sequence[:t]] for t in range(len(sequence))]
        return np.log(self.next_token_probs_SV[rows, list(sequence)])

    @cached_property
    def probs_Y(self) -> np.ndarray:
        return np.exp([self.token_logprobs(y).sum() for y in self.sequences])

    @cached_property
    def token_scores(self) -> list[np.ndarray]:
        """For each sequence the gradient of each token's log-probability, [T, D]: one-hot minus softmax in the prefix's row."""
        scores = []
        for y in self.sequences:
            block_TSV = np.zeros((len(y), *self.logits_SV.shape))
            for t, token in enumerate(y):
                row = self._row[y[:t]]
                block_TSV[t, row] = -self.next_token_probs_SV[row]
                block_TSV[t, row, token] += 1
            scores.append(block_TSV.reshape(len(y), -1))
        return scores

    @cached_property
    def scores_YD(self) -> np.ndarray:
        return np.array([score_TD.sum(axis=0) for score_TD in self.token_scores])

    @property
    def greedy(self) -> int:
        """Index of the sequence that takes the likeliest token at every step."""
        y: Sequence = ()
        while y not in self.sequences:
            y = (*y, int(np.argmax(self.logits_SV[self._row[y]])))
        return self.sequences.index(y)


def prefixes(vocab_size: int, max_length: int) -> list[Sequence]:
    """Every unfinished sequence, shortest first."""
    tokens = range(1, vocab_size)
    return [prefix for length in range(max_length) for prefix in itertools.product(tokens, repeat=length)]


def sequences(vocab_size: int, max_length: int) -> list[Sequence]:
    """Every finished sequence: a prefix and the end token, or `max_length` tokens. Shortest first."""
    ended = [(*prefix, END) for prefix in prefixes(vocab_size, max_length)]
    full = [
        (*prefix, token) for prefix in prefixes(vocab_size, max_length) if len(prefix) == max_length - 1 for token in range(1, vocab_size)
    ]
    return sorted(ended + full, key=lambda y: (len(y), y))


@dataclass(frozen=True, eq=False)
class Prompt:
    """One task of the lab: a policy and the reward of every sequence, `rewards_Y`. `teacher` is the policy to distil from.
    Two prompts are equal only if they are the same object."""

    name: str
    policy: TabularPolicy
    rewards_Y: np.ndarray
    teacher: TabularPolicy | None = None

    def value(self, prefix: Sequence) -> float:
        """Expected reward given that the sequence begins with `prefix`: the exact critic."""
        below = np.array([y[: len(prefix)] == prefix for y in self.policy.sequences])
        probs_Y = self.policy.probs_Y * below
        return float(probs_Y @ self.rewards_Y / probs_Y.sum())

    @property
    def mean_reward(self) -> float:
        return float(self.policy.probs_Y @ self.rewards_Y)


def binary_prompt(pass_rate: float, name: str = "") -> Prompt:
    """A prompt whose reward is 1 with probability `pass_rate` and else 0, over four sequences of up to three tokens.

    Right are `(1, 0)` and `(1, 1, 1)`, so that rewards and lengths mix; the teacher is right nine times in ten.

    Raises:
        ValueError: `pass_rate` is not strictly between 0 and 1.
    """
    if not 0 < pass_rate < 1:
        raise ValueError(f"pass_rate: must be strictly between 0 and 1, got {pass_rate}")
    rewards_Y = np.array([0.0, 1.0, 0.0, 1.0])  # (0), (1, 0), (1, 1, 0), (1, 1, 1)
    policy, teacher = (_with_pass_rate(p) for p in (pass_rate, 0.9))
    return Prompt(name or f"p={pass_rate:g}", policy, rewards_Y, teacher)


def graded_prompt(pass_rate: float, name: str = "") -> Prompt:
    """Like `binary_prompt`, but with a different reward for each sequence: 0, 1, 0.25 and 0.5."""
    base = binary_prompt(pass_rate)
    return Prompt(name or f"graded, p={pass_rate:g}", base.policy, np.array([0.0, 1.0, 0.25, 0.5]), base.teacher)


def _with_pass_rate(p: float) -> TabularPolicy:
    return TabularPolicy.from_probabilities(np.array([0.6 * (1 - p), 0.7 * p, 0.4 * (1 - p), 0.3 * p]), vocab_size=2, max_length=3)
