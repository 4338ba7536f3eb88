"""LayerKind: everything that is known about one kind of transformer layer.

A kind of layer is one module of this package, with a ``KIND``. The *parts* say what the layer is made
of, in forward order, and where each is found in the real module; the functions say what the parts cost.
Planners, simulator and runtime read a LayerKind and know no region by name, so another kind of layer is
another file.

A part is one of

- ``Submodule``: a call of a submodule of the layer;
- ``Glue``: what a parent module does between two of its submodules (splits, rotary embedding, activation);
- ``Operation``: what a factory on the layer returns when it is called, such as a bias-dropout-add;
- ``Mask``: what an operation draws and saves, which needs no input to be drawn again;
- ``Inner``: a function that runs inside a submodule's own code, such as the norm in a fused linear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_lynx.graph import LayerGraph
from megatron_lynx.spec import Batch, Model, Parallel


@dataclass(frozen=True, slots=True)
class Submodule:
    """The submodule at ``path`` of the layer.

    ``classes`` are the names of the module classes that were tested there: what another class saves is
    not known. ``gemm`` marks a linear, whose weight gradient is timed apart.
    """

    name: str
    path: str
    classes: tuple[str, ...]
    gemm: bool = False


@dataclass(frozen=True, slots=True)
class Glue:
    """What the module at ``parent`` does from the end of part ``after`` to the start of part ``before``.

    ``option`` names the flag without which there is no such glue, as ``Model`` and Megatron's config do.
    """

    name: str
    parent: str
    after: str
    before: str
    option: str = ""


@dataclass(frozen=True, slots=True)
class Operation:
    """What ``layer.<attribute>(training, fused)`` returns, called once in a forward pass."""

    name: str
    attribute: str


@dataclass(frozen=True, slots=True)
class Mask:
    """What ``inside`` saves of its own: drawn from the random state alone, whatever the inputs hold."""

    name: str
    inside: str


@dataclass(frozen=True, slots=True)
class Inner:
    """The function at the dotted path ``function``, as far as it runs inside part ``inside``.

    It runs without gradients, since an ``autograd.Function`` calls it; ``inside`` saves what it returns.
    """

    name: str
    inside: str
    function: str


Part = Submodule | Glue | Operation | Mask | Inner


def parts_with(parts: tuple[Part, ...], options: Any) -> tuple[Part, ...]:
    """Those of ``parts`` that a layer with ``options`` has."""
    return tuple(
        p for p in parts if not isinstance(p, Glue) or not p.option or getattr(options, p.option, False)
    )


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: FLOPs, bytes read and written, and whether it is a fused attention kernel.

    ``gemm`` is (m, n, k) where it is a matrix product of [m, k] and [k, n].
    """

    flops: int
    size_bytes: int
    attention: bool = False
    gemm: tuple[int, int, int] | None = None

    @classmethod
    def product(cls, tokens: int, inner: int, outer: int, e: int) -> Kernel:
        """A product of [tokens, inner] and [inner, outer], of ``e`` bytes an element: 2mnk FLOPs, each
        operand moved once."""
        moved = (tokens * inner + inner * outer + tokens * outer) * e
        return cls(2 * tokens * inner * outer, moved, gemm=(tokens, outer, inner))

    @classmethod
    def weight_gradient(cls, tokens: int, inner: int, outer: int, e: int) -> Kernel:
        """The weight gradient of the same product, added to an fp32 buffer (read and written)."""
        moved = tokens * (inner + outer) * e + 2 * 4 * inner * outer
        return cls(2 * tokens * inner * outer, moved, gemm=(outer, inner, tokens))


Work = Mapping[str, tuple[Kernel, ...]]
"""The kernels of each region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """Kernels of each region: of its forward, of its backward without weight gradients, and of those."""

    forward: Work
    dgrad: Work
    wgrad: Work


Shape = tuple[Model, Parallel, Batch]
"""What the description of a layer depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """One kind of layer.

    Attributes:
        name: Megatron's ``--transformer-impl`` of it.
        layer_class: name of the class of the whole layer.
        parts: every region in forward order, the input left out; the last one makes the layer's output.
        cuts: the regions at which a layer's backward falls into phases (``LayerGraph.cuts``).
        graph: what a layer reads, saves, draws and communicates, in bytes, from its shape alone.
        forward_slots: regions whose forward waits for a tensor-parallel collective, in order.
        backward_slots: such waits in the backward, in order: a region, or ``region.gather`` and
            ``region.scatter`` where one gathers its saved input and scatters the gradient of it.
        beside: by backward slot without its part after the dot, whether Megatron runs that region's
            weight gradient beside the reduction of its input gradient (a linear split by column).
        work: the kernels that it runs.
        workspace_bytes: what each phase of the backward needs beside saved storages.
        parameters: number of parameters of a layer on one rank, from the model and the TP size.
        recompute_modules: by the name that Megatron's ``--recompute-modules`` knows, the regions that it
            runs again.
        offload_modules: by the name that its ``--offload-modules`` knows, the regions whose saved tensors it
            moves to the host; a norm inside a linear is none of its own.
        parents: modules that hold its submodules: path, and the names of the classes that were tested there.
        within: names of classes of modules that may run within glue.
    """

    name: str
    layer_class: str
    parts: tuple[Part, ...]
    cuts: tuple[str, ...]
    graph: Callable[[Model, Parallel, Batch], LayerGraph]
    forward_slots: Callable[[Parallel], tuple[str, ...]]
    backward_slots: Callable[[Parallel], tuple[str, ...]]
    beside: frozenset[str]
    work: Callable[[Model, Parallel, Batch], LayerWork]
    workspace_bytes: Callable[[Model, Parallel, Batch], tuple[int, ...]]
    parameters: Callable[[Model, int], int]
    recompute_modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    offload_modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    parents: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    within: tuple[str, ...] = ()

    def having(self, options: Any) -> LayerKind:
        """The kind as it is with ``options``, a ``Model`` or Megatron's config of it."""
        parts = parts_with(self.parts, options)
        return self if len(parts) == len(self.parts) else replace(self, parts=parts)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its parts in forward order."""
        return tuple(part.name for part in self.parts)

    @property
    def output(self) -> str:
        """The part that makes the layer's output."""
        return self.parts[-1].name

    def masks(self) -> dict[str, str]:
        """What draws a mask, and the name of the mask."""
        return {part.inside: part.name for part in self.parts if isinstance(part, Mask)}

    def inner(self) -> dict[str, str]:
        """What runs inside a submodule: the submodule, and the name of the inner part."""
        return {part.inside: part.name for part in self.parts if isinstance(part, Inner)}

    def glue_before(self) -> dict[str, str]:
        """What begins where a glue ends, and the name of the glue."""
        return {part.before: part.name for part in self.parts if isinstance(part, Glue)}

    def glue_parents(self) -> frozenset[str]:
        """Paths of the modules that run glue."""
        return frozenset(part.parent for part in self.parts if isinstance(part, Glue))

    def called_before(self, glue: Glue) -> tuple[Submodule, ...]:
        """The submodules that ``glue``'s parent calls up to the glue, in order: a replay answers them from
        memory."""
        parts = self.parts[: self.names.index(glue.after) + 1]
        return tuple(p for p in parts if isinstance(p, Submodule) and p.path.startswith(f"{glue.parent}."))

    def gemms(self) -> dict[str, str]:
        """Its linears: name and path."""
        return {p.name: p.path for p in self.parts if isinstance(p, Submodule) and p.gemm}
