"""Factors of products that are made of parameters, by masks, norms, low-rank updates and the like: what lies between them and the parameters.

What a sample contributes to such a factor is as large as the factor, and goes through some nodes to the parameters. Where these serve one product
alone, it is not formed for all samples: it stays the product that it is as far as nodes keep it one (``Term``), and is carried on from there for some
of the samples at a time, while it stays in the cache.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from torch.autograd.graph import Node
from torch.nn import Parameter

from backpack.core.crossings import Gap
from backpack.core.flow import Columns, Flow, Use, add_columns, add_in_place, cast
from backpack.core.graph import shape_of, tensor_at
from backpack.core.networks import Network
from backpack.core.plan import Plan
from backpack.core.slots import Edge
from backpack.core.terms import Carried, Term, spread, start, through
from backpack.core.units import Unit
from backpack.core.ways import SPLIT
from backpack.utils.columns import blocks

_BLOCK = 2**20
"""Entries of the factor's columns that are carried at once.

Measured for weights of 256 x 256 with masks, norms and spectral norms, one thread: with 2^18 entries it takes 1.1 times as long, with 2^16 twice.
"""
_MOST = 4
"""Terms of a sum that are multiplied with each other."""


class Made(NamedTuple):
    """The nodes between a factor and the parameters of which it is made.

    Attributes:
        edge: Edge of the factor.
        gaps: The nodes, consumers before producers.
        uses: For each parameter the number of edges that lead to it from there.
    """

    edge: Edge
    gaps: list[Gap]
    uses: dict[Parameter, int]

    @classmethod
    def at(cls, edge: Edge, plan: Plan) -> Made | None:
        """Collect the nodes behind a factor.

        Args:
            edge: Edge of the factor.
            plan: The plan.

        Returns:
            What was found; ``None`` if some of them serve something else, too, or stand for layers whose rules are better.
        """
        walk, made, ready, inside = plan.walk, cls(edge, [], {}), [edge[0]], set[Node]()
        seen = {edge[0]: [edge[1]]}
        while ready:
            node = ready.pop()
            numbers, gap = seen.pop(node), plan.gaps.get(node)
            if len(numbers) != walk.consumers[node]:
                return None
            if node in plan.shared:  # a layer that is called once for all samples, as of low rank
                unit = plan.shared[node]
                if sum(p.numel() for p in unit.parameters.values()) > shape_of(edge).numel():
                    return None  # its rule need not form what is larger
                inside |= unit.inside
            if node in inside:
                nexts = [(n, nr, shape_of((n, nr))) if n is not None and walk.reach[n] else None for n, nr in node.next_functions]
                gap = Gap(node, dict.fromkeys(numbers, SPLIT), nexts, ())
            if gap is None or set(gap.states.values()) != {SPLIT}:
                return None
            made.gaps.append(gap)
            for upstream, nr, _ in filter(None, gap.upstream):
                if upstream in walk.leaves:
                    made.uses[upstream.variable] = made.uses.get(upstream.variable, 0) + 1
                    continue
                seen.setdefault(upstream, []).append(nr)
                if len(seen[upstream]) == walk.consumers[upstream]:
                    ready.append(upstream)
        return None if seen else made


class MadeUse:
    """A use of parameters in a factor that is made of them.

    Attributes:
        samples: Number of samples.
        uses: For each parameter that is asked for the number of its uses that this one stands for.
        terms: Parameters to which all of it arrives as a term, or as a sum of some.
        formed: Parameters to which all of it arrives as something small that has been formed, ``{source: [V, N, *parameter]}``.
    """

    def __init__(self, made: Made, use: Use, name: str, wanted: set[Parameter]) -> None:
        """Take note of a use of a factor.

        Args:
            made: What lies behind the factor.
            use: Its use, of which each row belongs to a sample of its own.
            name: Name of the factor there.
            wanted: The parameters that are asked for.
        """
        self._made, self._use, self._name = made, use, name
        self.samples, self.uses = use.layout.samples, {parameter: n for parameter, n in made.uses.items() if parameter in wanted}
        self.terms: dict[Parameter, list[Term | Network]] = {}
        self.formed: dict[Parameter, Columns] = {}
        self._starts: dict[Edge, list[Carried]] = {}
        self._behind = set[Node]()

    def carry(self) -> None:
        """Carry what the samples contribute as far as it need not be formed."""
        edge = self._made.edge
        arrived: dict[Edge, list[Carried]] = {edge: [start(self._use, self._name, tensor_at(edge))]}
        for gap in self._made.gaps:
            self._follow(gap, arrived)
        for edge, values in arrived.items():
            parameter = edge[0].variable
            if parameter not in self.uses:
                continue
            if len(values) > 1 or not isinstance(values[0], dict) or edge[0] in self._behind:
                self._starts[edge] = values
            if edge[0] in self._behind:
                continue
            if isinstance(values[0], dict) and len(values) == 1:  # others may hold it, too
                self.formed[parameter] = {source: columns.to(parameter.dtype, copy=True) for source, columns in values[0].items()}
            elif all(not isinstance(value, dict) and value.is_entrywise for value in values) and len(values) <= _MOST:
                self.terms[parameter] = [value.to(parameter.dtype) for value in values]

    @property
    def others(self) -> set[Parameter]:
        """Parameters to which what arrives has to be formed in blocks."""
        return self.uses.keys() - self.terms.keys() - self.formed.keys()

    @classmethod
    def of(cls, use: Use, name: str, unit: Unit, plan: Plan, flow: Flow, concerned: dict[Flow, int]) -> MadeUse | None:
        """Read a use of a factor, if what it contributes can be read off before the nodes behind the factor run.

        Args:
            use: The use of the factor.
            name: Name of the factor there.
            unit: What the use belongs to.
            plan: The plan.
            flow: The flow.
            concerned: All that is carried in the pass, and bit sets of the parameters that are asked for.

        Returns:
            The use; ``None`` if these nodes serve something else, too, if samples have several rows, or if others need the gradient at the nodes.
        """
        if not (flow.crosses_gaps and use.layout.samples and use.parts[0].layout.plain):
            return None
        made = Made.at(unit.split[name], plan)
        if made is None or (flow.is_gradient and any(f.bears_at(plan.walk, bits, gap) for f, bits in concerned.items() for gap in made.gaps)):
            return None
        return cls(made, use.parts[0], name, {p for p in made.uses if plan.walk.bits[id(p)] & concerned[flow]})

    def _follow(self, gap: Gap, arrived: dict[Edge, list[Carried]]) -> None:
        # from a node to its inputs
        given = {nr: arrived.pop((gap.node, nr)) for nr in gap.states if (gap.node, nr) in arrived}
        nexts = [None if crossing is None else upstream for upstream, crossing in zip(gap.nexts, gap.crossings, strict=True)]
        sent = None if gap.node in self._behind else self._sent(gap, given, nexts)
        if sent is None:
            self._starts.update({(gap.node, nr): each for nr, each in given.items()})
            self._behind.update(upstream[0] for upstream in nexts if upstream is not None)
            return
        for upstream, values in zip(nexts, sent, strict=True):
            for value in () if upstream is None else filter(None, values):
                _add(arrived.setdefault(upstream[:2], []), value)
            if upstream is not None and len(arrived.get(upstream[:2], ())) > _MOST:
                arrived[upstream[:2]] = _joined(arrived[upstream[:2]])

    def _sent(self, gap: Gap, given: dict[int, list[Carried]], nexts: list) -> list[list[Carried]] | None:
        # what a node sends to each of its inputs; nothing if all of it would have to be formed
        values, node = [value for each in given.values() for value in each], gap.node
        few = max(shape_of((node, nr)).numel() for nr in given) if given else 0
        limit = max(shape_of(self._made.edge).numel() - 1, few)  # what has few entries does not become as large as the factor
        small = all(upstream is None or upstream[2].numel() <= limit for upstream in nexts)
        if small and all(isinstance(value, dict) for value in values):
            return [[columns] for columns in self._called(gap, {nr: columns for nr, (columns,) in given.items()})]
        if given.keys() != {0} or len(values) > _MOST:
            return None
        sent = []
        for number, upstream in enumerate(nexts):
            parts = [[]] if upstream is None else [self._through(value, gap, number, small) for value in values]
            if None in parts:
                return None
            sent.append([part for each in parts for part in each])
        return sent

    @classmethod
    def _through(cls, value: Carried, gap: Gap, number: int, small: bool) -> list[Carried] | None:
        if not isinstance(value, dict):
            return through(value, gap.node, number)
        if small:
            return [cls._called(gap, {0: value})[number]]
        term = spread(value, gap.node, number)
        return None if term is None else [term]

    @staticmethod
    def _called(gap: Gap, given: dict[int, Columns]) -> list[Columns]:
        sources = dict.fromkeys(source for columns in given.values() for source in columns)
        returned = {source: gap.call_split({nr: columns[source] for nr, columns in given.items() if source in columns}) for source in sources}
        return [{source: sent[i] for source, sent in returned.items() if sent[i] is not None} for i in range(len(gap.nexts))]

    def blocks(self, wanted: set[Parameter]) -> list[slice]:
        """Cut the samples into blocks of a size at which they are best carried.

        Args:
            wanted: The parameters to which they are carried.

        Returns:
            The blocks.
        """
        starts = self._starts_for(wanted)
        called = {*self._behind, *(node for node, _ in starts)}
        formed = [shape_of(edge).numel() for edge in starts]
        formed += [value.width for values in starts.values() for value in values if not isinstance(value, dict)]
        formed += [upstream[2].numel() for gap in self._made.gaps if gap.node in called for upstream in filter(None, gap.upstream)]
        return blocks(self.samples, max(map(len, self._use.value.values())) * max(formed, default=1), _BLOCK)

    def _starts_for(self, wanted: set[Parameter]) -> dict[Edge, list[Carried]]:
        return {edge: values for edge, values in self._starts.items() if getattr(edge[0], "variable", None) in {None, *wanted}}

    def columns(self, part: slice, wanted: set[Parameter]) -> dict[Parameter, Columns]:
        """Carry what some samples contribute to the parameters where it has to be formed.

        Args:
            part: The samples.
            wanted: The parameters.

        Returns:
            For each of these parameters ``{source: [V, n, *parameter]}``.
        """
        found: dict[Parameter, Columns] = {}
        arrived: dict[Edge, Columns] = {}

        def arrive(edge: Edge, columns: Columns) -> None:
            columns, parameter = cast(columns, tensor_at(edge).dtype), getattr(edge[0], "variable", None)
            if parameter in wanted:
                found[parameter] = add_columns(found.get(parameter, {}), columns)
            elif parameter is None:
                arrived[edge] = add_columns(arrived.get(edge, {}), columns)

        for edge, values in self._starts_for(wanted).items():
            columns: Columns = {}
            own = set[Hashable]()
            for value in values:
                formed = not isinstance(value, dict)
                new = value.formed(part) if formed else {source: c[:, part] for source, c in value.items()}
                columns = add_in_place(columns, new, own, fresh=formed)
            arrive(edge, columns)
        for gap in self._made.gaps:
            given = {nr: arrived.pop((gap.node, nr)) for nr in gap.states if (gap.node, nr) in arrived}
            for upstream, sent in zip(gap.nexts, self._called(gap, given), strict=True) if given else ():
                if upstream is not None and sent:
                    arrive(upstream[:2], sent)
        return found


def _joined(values: list[Carried]) -> list[Carried]:
    # products without scales are one with more positions
    nets = [value for value in values if isinstance(value, Network)]
    joined = nets[0].joined(nets[1:]) if nets else None
    return values if joined is None else [*(value for value in values if not isinstance(value, Network)), joined]


def _add(values: list[Carried], value: Carried) -> None:
    # to the sum of what has arrived at an edge
    for number, other in enumerate(values):
        if isinstance(other, dict) and isinstance(value, dict):
            values[number] = add_columns(other, value)
            return
        merged = other.merged(value) if isinstance(other, Network) and isinstance(value, Network) else None
        if merged is not None:
            values[number] = merged
            return
    values.append(value)
