"""The sets of tensors that are stepped: the shapes of real models, and extremes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

HOST = "host"
"""The set of which the host's time alone is measured."""

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TensorSet:
    """The tensors of a model, by their numbers of elements."""

    name: str
    description: str
    sizes: tuple[int, ...]
    flat: bool = False
    """Consecutive slices of one buffer, wherever they begin; otherwise a buffer for each tensor."""
    shapes: tuple[Shape, ...] = ()
    """The shape of each tensor, for weights whose rows and columns matter; else empty."""

    @classmethod
    def of_shapes(cls, name: str, description: str, shapes: Sequence[Shape]) -> "TensorSet":
        """Return the set of tensors of these shapes, a buffer for each."""
        sizes = tuple(math.prod(shape) for shape in shapes)
        return cls(name=name, description=description, sizes=sizes, shapes=tuple(shapes))

    def shrunk(self, elements: int, tensors: int = 64) -> "TensorSet":
        """Return a set in the proportions of this one, for a check in place of a measurement.

        It has at most about so many elements, one in each tensor at least, and at most so many
        tensors, taken evenly from the set.
        """
        step = -(-len(self.sizes) // tensors)
        chosen = self.sizes[::step]
        total = sum(chosen)
        sizes = tuple(min(size, max(1, size * elements // total)) for size in chosen)
        if not self.shapes:
            return replace(self, sizes=sizes)

        def multiple(size: int, *divisors: int) -> int:
            return next((size - size % divisor for divisor in divisors if size >= divisor), size)

        shapes: list[Shape] = []
        for shape, size in zip(self.shapes[::step], sizes, strict=True):
            if len(shape) != 2:
                shapes.append((size,))
                continue
            # rows and columns are multiples of 16 where there is room, as products in fp8 want
            # them, and columns of 128 where they can be, as moments in blocks want them
            ideal = int(shape[1] * math.sqrt(size / math.prod(shape)))
            least = next(side for side in (128, 16, 1) if side * side <= size)
            columns = multiple(min(max(ideal, least), size // least, shape[1]), 128, 16)
            shapes.append((multiple(size // columns, 16), columns))
        return self.of_shapes(self.name, self.description, shapes)


def _llama(hidden: int, key_value: int, feed_forward: int, layers: int) -> tuple[Shape, ...]:
    """Return the shape of each tensor of a Llama 3.1, in the model's order."""
    ends = (128256, hidden)
    query, key, norm = (hidden, hidden), (key_value, hidden), (hidden,)
    up, down = (feed_forward, hidden), (hidden, feed_forward)
    layer = [query, key, key, query, up, up, down, norm, norm]
    return (ends, *layer * layers, norm, ends)


LLAMA_8B = [(shape[0] // 8, *shape[1:]) for shape in _llama(4096, 1024, 14336, 32)]
"""An eighth of each tensor."""
LLAMA_70B = [
    # every second cut of a flat buffer is moved by one element, as cuts between ranks can fall
    math.prod(shape) // 64 + (1 if index % 2 == 0 else -1)
    for index, shape in enumerate(_llama(8192, 1024, 28672, 80))
]
"""The elements of a 64th of each tensor."""
EXPERTS = [
    *[*[(2048, 2048)] * 4, (64, 2048), (2048,), (2048,)],
    *[(1408, 2048), (1408, 2048), (2048, 1408)] * 64,
]
"""A layer."""
GPT2 = [
    *[(768,), (768,), (2304, 768), (2304,), (768, 768), (768,)],
    *[(768,), (768,), (3072, 768), (3072,), (768, 3072), (768,)],
]
"""A layer: norm, attention, norm, feed-forward; each weight is followed by its bias."""
SETS = {
    tensor_set.name: tensor_set
    for tensor_set in (
        TensorSet.of_shapes("A", "one tensor of 2**28 elements", [(2**14, 2**14)]),
        TensorSet.of_shapes("B", "Llama-3.1-8B's 291 tensors, an eighth of each", LLAMA_8B),
        TensorSet(name="C", description="4,000 tensors of 1,024 elements", sizes=(1024,) * 4000),
        TensorSet(
            name="llama70b-64",
            description="Llama-3.1-70B's 723 tensors, 1/64 of each, one buffer, half unaligned",
            sizes=tuple(LLAMA_70B),
            flat=True,
        ),
        TensorSet.of_shapes(
            "moe64", "4 layers of 64 experts, hidden 2,048, expert 1,408: 796 tensors", EXPERTS * 4
        ),
        TensorSet.of_shapes(
            "gpt2",
            "GPT-2's 148 tensors (124M)",
            [(50257, 768), (1024, 768), *GPT2 * 12, (768,), (768,)],
        ),
    )
}
