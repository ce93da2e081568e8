"""Recognize the routed experts of a mixture of experts.

Matches (the products in any of three forms, everything else in any spelling):
    rows = x[perm // K]                                 # perm sorts the N * K chosen experts
    y = act(grouped_mm(rows, up, counts) + up_bias[e])  # transformers' custom operator or aten._grouped_mm
    y = (grouped_mm(y, down, counts) + down_bias[e]) * w[perm]
    out = y[inverse of perm].view(N, K, H).sum(1)

    the same with cat([linear(part, up[i]) for i, part in enumerate(split(rows, counts))])

    rows = x.repeat(E, 1) * sigmoid(scattered scores)   # every expert computes every token; most of them zeros
    out = bmm(act(bmm(rows, up)), down).sum(0)
Becomes:
    pagoda::moe(x, w, ids, up, down, up_bias, down_bias, activation, alpha, limit, layout, transposed, weight_input)
Why it is faster:
    one operator instead of about thirty; nothing of it depends on how many tokens an expert gets, so that a target
    can take the whole; and where every expert computed every token, only the chosen ones do.

Level 2. The graph is cut at the products, whose meaning is known, and what lies before, between and behind them is
run on random numbers and compared with the operator. The weights are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..graph.data_movement import RESHAPES
from ..graph.fx_nodes import callee, is_dynamic, is_tensor, shape, value
from ..graph.record import NoMatch, PassRecord
from ..graph.region import Region
from ..graph.rewrite_each import rewrite_each
from ..graph.traced import TracedGraph
from .expert_formula import ExpertFormula, RandomNumbers, close, find_formula
from .expert_products import ExpertProduct, expert_product, parts, products_before

MOE = torch.ops.pagoda.moe.default

_VIEWS = RESHAPES | {"clone", "expand", "squeeze.dim", "unsqueeze"}
_ENTRYWISE = ("_to_copy", "sigmoid", "exp", "relu", "tanh")
_NEARBY = 60
_LARGEST_RUN = 1 << 25


@dataclass(frozen=True)
class _Block:
    """A mixture of experts, read from the graph.

    Attributes:
        up, down: its two products.
        up_bias, down_bias: ``[E, ...]``, or None.
        x: the tokens ``[N, H]``.
        ids, weights: ``[N, K]``.
        output: the sum over the experts.
        formula: what lies between the products; set when it has been compared.
        scores: where the input is weighted, the functions of one tensor that make ``weights`` into the scores.
    """

    up: ExpertProduct
    down: ExpertProduct
    up_bias: fx.Node | None
    down_bias: fx.Node | None
    x: fx.Node
    ids: fx.Node
    weights: fx.Node
    output: fx.Node
    formula: ExpertFormula | None = None
    scores: tuple[fx.Node, ...] = ()

    @property
    def experts(self) -> int:
        return int(shape(self.up.weight)[0])


_Known = dict[Hashable, ExpertFormula | str]


def recognize_moe(traced: TracedGraph) -> PassRecord:
    """Replace every group of routed experts by ``pagoda::moe``."""
    products = {p.node: p for n in traced.graph.nodes if (p := expert_product(n)) is not None}
    known: _Known = {}
    paired: set[fx.Node] = set()

    def step(node: fx.Node) -> str | None:
        down = products[node]
        ups = products_before(down, products)
        if not ups:
            return None
        paired.update((node, *ups))
        if len(ups) > 1:
            return f"{len(ups)} products make the input of the last one; gate and up are not merged"
        up = products[ups[0]]
        _replace(traced, _dense(up, down, known) if down.counts is None else _routed(up, down, known))
        return ""

    record = rewrite_each(traced, "recognize_moe", step, products)
    for product in products.values():
        if product.counts is not None and product.node not in paired:
            record.reject(product.node, "no second product per expert follows the first")
    return record


def _routed(up: ExpertProduct, down: ExpertProduct, known: _Known) -> _Block:
    """The block around two products over rows sorted by expert."""
    if callee(up.rows) != "index.Tensor" or len(up.rows.args[1]) != 1:
        raise NoMatch("the rows of the first product are not gathered from the tokens")
    gathered: Any = up.rows.args
    x, (order,) = gathered
    while callee(order) in ("floor_divide", "div.Tensor_mode", "_to_copy"):
        order = order.args[0]
    if callee(order) != "getitem" or order.args[1] != 1 or callee(order.args[0]) not in ("sort", "sort.stable"):
        raise NoMatch("the rows of the first product are not sorted by expert")
    ids = _per_token(order.args[0].args[0])
    output = _sum_over_experts(down.node, value(x).dtype)
    weights, down_bias = _gathered(output, down, order)
    others, up_bias = _gathered(down.rows, up, order)
    if len(weights) != 1 or others:
        raise NoMatch(f"each row is multiplied by {len(weights) + len(others)} weights, not by one")
    block = _Block(up, down, up_bias, down_bias, x, ids, weights[0], output)
    _check_shapes(block)
    assert up.counts is not None and down.counts is not None
    before = Region([x, ids], [up.rows, up.counts, down.counts, order])
    between = Region([n for n in (up.node, ids, up_bias) if n is not None], [down.rows])
    behind = Region([n for n in (down.node, ids, weights[0], down_bias) if n is not None], [output])
    _check_users(block, between, behind)
    key = (before.signature(), between.signature(), behind.signature(), block.experts, up.cumulative)
    formula = _once(known, key, lambda: _compare_routed(block, before, between, behind))
    return replace(block, formula=formula)


def _per_token(flat: fx.Node) -> fx.Node:
    """The ``[N, K]`` tensor that ``flat`` is a view of."""
    node = flat
    while callee(node) in _VIEWS and len(shape(node)) != 2:
        node = node.args[0]
    if len(shape(node)) != 2 or is_dynamic(shape(node)[1]):
        raise NoMatch(f"{flat.name} is not a view of one entry per token and chosen expert")
    return node


def _sum_over_experts(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The sum that follows the second product, cast to ``dtype``."""
    for _ in range(12):
        node = _only_user(node)
        if callee(node) in ("sum.dim_IntList", "index_add"):
            return node if value(node).dtype == dtype else _only_user(node)
    raise NoMatch("no sum over the experts follows the second product")


def _only_user(node: fx.Node) -> fx.Node:
    if len(node.users) != 1:
        raise NoMatch(f"{node.name} has {len(node.users)} users")
    return next(iter(node.users))


def _gathered(end: fx.Node, product: ExpertProduct, order: fx.Node) -> tuple[list[fx.Node], fx.Node | None]:
    """Tensors gathered for the rows between ``product`` and ``end``: weights ``[N, K]``, and the bias per expert."""
    experts = shape(product.weight)[0]
    weights: list[fx.Node] = []
    biases: list[fx.Node] = []
    seen = {product.node, order.args[0]}
    pending = [end]
    while pending and len(seen) < _NEARBY:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        source = node.args[0] if callee(node) == "index.Tensor" else None
        if source is not None and len(shape(source)) == 2 and shape(source)[0] == experts:
            biases.append(source)
        elif source is not None and len(shape(source)) == 1 and node.args[1] == [order]:
            weights.append(_per_token(source))
        else:
            pending += node.all_input_nodes
    if len(biases) > 1:
        raise NoMatch("more than one bias per expert is added to a product")
    return weights, biases[0] if biases else None


def _check_shapes(block: _Block) -> None:
    if len(shape(block.x)) != 2 or is_dynamic(shape(block.x)[1]):
        raise NoMatch(f"the tokens have shape {tuple(shape(block.x))}, not [N, H]")
    tokens, dtype = shape(block.x)[0], value(block.x).dtype
    if str(shape(block.weights)) != str(shape(block.ids)) or str(shape(block.ids)[0]) != str(tokens):
        raise NoMatch(f"weights {shape(block.weights)} and ids {shape(block.ids)} do not belong to {tokens} tokens")
    if str(shape(block.output)) != str((tokens, shape(block.down.node)[-1])) or value(block.output).dtype != dtype:
        raise NoMatch(f"the sum is {value(block.output).dtype} {tuple(shape(block.output))}, unlike the tokens")
    if any(value(n).dtype != dtype for n in (block.up.weight, block.down.weight)):
        raise NoMatch(f"the tokens are {dtype}, the weights {value(block.up.weight).dtype}")
    if block.up.transposed != block.down.transposed:
        raise NoMatch("one of the weights is stored transposed, the other is not")


def _check_users(block: _Block, between: Region, behind: Region) -> None:
    """Nothing but the block may read what its products yield."""
    inside = {*between.nodes, *behind.nodes, block.down.node, *parts(block.down)}
    pending, seen = [block.up.node], {block.output}
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        for user in node.users:
            if user not in inside:
                raise NoMatch(f"{node.name} is also read by {user.name}")
            pending.append(user)


def _once(known: _Known, key: Hashable, compare: Callable[[], ExpertFormula]) -> ExpertFormula:
    """The formula of a block; of blocks with one structure the first is run."""
    if key not in known:
        try:
            known[key] = compare()
        except NoMatch as reason:
            known[key] = str(reason)
    found = known[key]
    if isinstance(found, str):
        raise NoMatch(found)
    return found


def _compare_routed(block: _Block, before: Region, between: Region, behind: Region) -> ExpertFormula:
    """Run the parts of a block on a few tokens.

    Raises:
        NoMatch: a part does not do what the operator does.
    """
    numbers = RandomNumbers(before, between, behind)
    x = numbers.like(block.x)
    tokens, count = len(x), shape(block.ids)[1]
    _check_cost(block, tokens * count)
    ids = numbers.chosen(tokens, block.experts, count, value(block.ids).dtype)
    rows, ends, second_ends, order = before.run(numbers.sizes, [x, ids])
    expert_of_row = ids.flatten().long()[order]
    per_expert = torch.bincount(expert_of_row, minlength=block.experts)
    expected_ends = per_expert.cumsum(0) if block.up.cumulative else per_expert
    if not (
        torch.equal(order.sort().values, torch.arange(tokens * count))
        and bool((expert_of_row.diff() >= 0).all())
        and torch.equal(rows, x[order // count])
        and torch.equal(ends.long(), expected_ends)
        and torch.equal(second_ends.long(), expected_ends)
    ):
        raise NoMatch("the products are not over the tokens' rows sorted by expert")

    def result(
        product: ExpertProduct, bias: fx.Node | None, largest: float
    ) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """A product, the bias if any, and their sum."""
        plain = numbers.normal((tokens * count, shape(product.node)[-1]), value(product.node).dtype, largest)
        biases = [] if bias is None else [numbers.like(bias)]
        return plain, biases, sum((b[expert_of_row] for b in biases), plain)

    plain, biases, hidden = result(block.up, block.up_bias, _largest(between))
    (found,) = between.run(numbers.sizes, [plain, ids, *biases])
    formula = find_formula(hidden, found, between.numbers())
    plain, biases, terms = result(block.down, block.down_bias, 1.0)
    weights = numbers.like(block.weights)
    (found,) = behind.run(numbers.sizes, [plain, ids, weights, *biases])
    chosen = torch.empty_like(terms)
    chosen[order] = terms
    if not close(found, (chosen.view(tokens, count, -1) * weights[..., None]).sum(1).to(x.dtype)):
        raise NoMatch("the second product is not followed by a weighted sum over the chosen experts")
    return _known_formula(formula)


def _dense(up: ExpertProduct, down: ExpertProduct, known: _Known) -> _Block:
    """The block around two products of all tokens with all experts, whose inputs are weighted."""
    x, scatter = _weighted_tokens(up.rows)
    arguments: Any = scatter.args
    _, dim, ids, chosen = arguments
    if dim not in (1, -1):
        raise NoMatch(f"the scores are scattered along dim {dim}, not over the experts")
    scores = tuple(_functions_of(scatter))
    output = _sum_over_experts(down.node, value(x).dtype)
    block = _Block(up, down, None, None, x, ids, chosen, output, scores=scores)
    _check_shapes(block)
    before = Region([x, ids, chosen], [up.rows])
    between = Region([up.node], [down.rows])
    behind = Region([down.node], [output])
    _check_users(block, between, behind)
    key = (before.signature(), between.signature(), behind.signature(), block.experts, len(scores))
    return replace(block, formula=_once(known, key, lambda: _compare_dense(block, before, between, behind)))


def _weighted_tokens(rows: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The tokens ``[N, H]`` and the scatter of their scores that ``rows`` is the product of."""
    tokens: list[fx.Node] = []
    scatters: list[fx.Node] = []
    pending = [rows]
    seen: set[fx.Node] = set()
    while pending and len(seen) < _NEARBY:
        node = pending.pop()
        if node in seen or not is_tensor(node):
            continue
        seen.add(node)
        if callee(node) in ("repeat", "expand") and len(shape(node.args[0])) == 2:
            tokens.append(node.args[0])
        elif callee(node) == "scatter.src":
            scatters.append(node)
        else:
            pending += node.all_input_nodes
    if len(tokens) != 1 or len(scatters) != 1:
        raise NoMatch("the input of the first product is not one matrix of tokens times scattered scores")
    return tokens[0], scatters[0]


def _functions_of(scatter: fx.Node) -> list[fx.Node]:
    """The functions of one tensor, entry by entry, that follow the scattered scores."""
    found, node = [], scatter
    while len(node.users) == 1:
        node = next(iter(node.users))
        if callee(node) not in _ENTRYWISE:
            break
        found.append(node)
    return found


def _compare_dense(block: _Block, before: Region, between: Region, behind: Region) -> ExpertFormula:
    """Run the parts of a block on a few tokens.

    Raises:
        NoMatch: a part does not do what the operator does.
    """
    numbers = RandomNumbers(before, between, behind)
    x, scores = numbers.like(block.x), numbers.like(block.weights)
    tokens = len(x)
    _check_cost(block, tokens * block.experts)
    ids = numbers.chosen(tokens, block.experts, shape(block.ids)[1], value(block.ids).dtype)
    (rows,) = before.run(numbers.sizes, [x, ids, scores])
    for function in block.scores:
        scores = function.target(scores, *function.args[1:], **function.kwargs)  # type: ignore[operator]
    expected = torch.zeros(block.experts, *x.shape, dtype=x.dtype)
    expected[ids.long(), torch.arange(tokens)[:, None]] = (x[:, None] * scores[..., None]).to(x.dtype)
    if not close(rows, expected):
        raise NoMatch("the input of the first product is not the tokens, weighted where they chose the expert")

    def result(product: ExpertProduct, largest: float) -> torch.Tensor:
        sizes = (block.experts, tokens, shape(product.node)[-1])
        return numbers.normal(sizes, value(product.node).dtype, largest)

    hidden, terms = result(block.up, _largest(between)), result(block.down, 1.0)
    (found,) = between.run(numbers.sizes, [hidden])
    formula = _known_formula(find_formula(hidden, found, between.numbers()))
    if bool(formula(torch.zeros_like(hidden)).any()):
        raise NoMatch("an expert that was not chosen still adds something")
    (found,) = behind.run(numbers.sizes, [terms])
    if not close(found, terms.sum(0)):
        raise NoMatch("the second product is not followed by the sum over the experts")
    return formula


def _check_cost(block: _Block, rows: int) -> None:
    """Graphs with a fixed number of tokens can only be run on as many."""
    features = max(shape(block.x)[1], *(shape(p.node)[-1] for p in (block.up, block.down)))
    if rows * features > _LARGEST_RUN:
        raise NoMatch(f"the graph is fixed to {rows} rows of experts, too many to run it; trace with dynamic=True")


def _known_formula(formula: ExpertFormula | None) -> ExpertFormula:
    if formula is None:
        raise NoMatch("the function between the two products is not a supported activation")
    return formula


def _largest(between: Region) -> float:
    """The size that numbers between the products need for every limit there to matter, of scaled numbers as well."""
    sizes = [abs(x) for x in between.numbers()]
    return max([3.0, *sizes]) / min([1.0, *sizes])


def _replace(traced: TracedGraph, block: _Block) -> None:
    assert block.formula is not None
    formula, weights = block.formula, block.weights
    with traced.before(block.output):
        for function in block.scores:
            weights = traced.call(function.target, weights, *function.args[1:], **function.kwargs)
        new = traced.call(
            MOE,
            block.x,
            weights,
            block.ids,
            block.up.weight,
            block.down.weight,
            block.up_bias,
            block.down_bias,
            formula.activation,
            formula.alpha,
            formula.limit,
            formula.layout,
            block.up.transposed,
            block.down.counts is None,
        )
    traced.substitute(block.output, new)
