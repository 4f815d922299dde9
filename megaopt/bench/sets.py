"""The sets of tensors that are stepped: the shapes of real models, and extremes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["SETS", "TensorSet"]


@dataclass(frozen=True, kw_only=True)
class TensorSet:
    """The tensors of a model, by their numbers of elements."""

    name: str
    description: str
    sizes: tuple[int, ...]
    flat: bool = False
    """Consecutive slices of one buffer, wherever they begin; otherwise a buffer for each tensor."""

    def shrunk(self, elements: int, tensors: int = 64) -> "TensorSet":
        """Return a set in the proportions of this one, for a check in place of a measurement.

        Args:
            elements: At most about so many elements in all; every tensor keeps at least one.
            tensors: At most how many tensors, taken evenly from the set.
        """
        chosen = self.sizes[:: -(-len(self.sizes) // tensors)]
        total = sum(chosen)
        sizes = tuple(min(size, max(1, size * elements // total)) for size in chosen)
        return replace(self, sizes=sizes)


def _llama(hidden: int, key_value: int, feed_forward: int, layers: int) -> tuple[int, ...]:
    """Return the elements of each tensor of a Llama 3.1, in the model's order."""
    vocabulary = 128256
    attention = [hidden * hidden, hidden * key_value, hidden * key_value, hidden * hidden]
    layer = [*attention, *[hidden * feed_forward] * 3, hidden, hidden]
    return (vocabulary * hidden, *layer * layers, hidden, vocabulary * hidden)


def _off_alignment(sizes: Sequence[int]) -> tuple[int, ...]:
    """Move every second cut of a flat buffer by one element, as cuts between ranks can fall."""
    return tuple(size + (1 if index % 2 == 0 else -1) for index, size in enumerate(sizes))


def _experts(layers: int = 4, experts: int = 64) -> tuple[int, ...]:
    hidden, feed_forward = 2048, 1408
    layer = [hidden * hidden] * 4 + [experts * hidden] + [hidden, hidden]
    return (*layer, *[hidden * feed_forward] * (3 * experts)) * layers


def _gpt2() -> tuple[int, ...]:
    """Return the elements of GPT-2's 148 tensors: each weight is followed by its bias."""
    hidden, layers = 768, 12
    attention = [3 * hidden * hidden, 3 * hidden, hidden * hidden, hidden]
    feed_forward = [4 * hidden * hidden, 4 * hidden, 4 * hidden * hidden, hidden]
    norm = [hidden, hidden]
    layer = [*norm, *attention, *norm, *feed_forward]
    return (50257 * hidden, 1024 * hidden, *layer * layers, *norm)


SETS = {
    tensor_set.name: tensor_set
    for tensor_set in (
        TensorSet(name="A", description="one tensor of 2**28 elements", sizes=(2**28,)),
        TensorSet(
            name="B",
            description="Llama-3.1-8B's 291 tensors, an eighth of each",
            sizes=tuple(size // 8 for size in _llama(4096, 1024, 14336, 32)),
        ),
        TensorSet(name="C", description="4,000 tensors of 1,024 elements", sizes=(1024,) * 4000),
        TensorSet(
            name="llama70b-64",
            description="Llama-3.1-70B's 723 tensors, 1/64 of each, one buffer, half unaligned",
            sizes=_off_alignment([size // 64 for size in _llama(8192, 1024, 28672, 80)]),
            flat=True,
        ),
        TensorSet(
            name="moe64",
            description="4 layers of 64 experts, hidden 2,048, expert 1,408: 796 tensors",
            sizes=_experts(),
        ),
        TensorSet(name="gpt2", description="GPT-2's 148 tensors (124M)", sizes=_gpt2()),
    )
}
