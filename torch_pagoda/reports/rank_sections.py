"""Sections of a report about several ranks, for a terminal and a page."""

from __future__ import annotations

from ..compiler.costs.rank_shares import RankShares
from ..compiler.costs.stage_shares import StageShares
from ..rendering.section import Section, Styled
from .wording import size, times

LEAST_SHARE = 1e-4
"""Of a rank's weights: smaller ones that it holds whole are listed as one row."""
MOST_OVER = 1.05
"""An even part times this; more is marked."""


def rank_sections(shares: RankShares | None) -> list[Section]:
    """Each rank's part, the collectives of a step and the weights that stay whole; [] for one rank."""
    if shares is None:
        return []
    return [section for section in (_parts(shares), _exchanges(shares), _whole(shares)) if section.rows]


def stage_sections(shares: StageShares | None) -> list[Section]:
    """What each rank of a pipeline's stages holds; [] without stages."""
    if shares is None:
        return []
    rows = tuple(
        (
            str(number),
            f"{share.first}–{share.last}" if share.last > share.first else str(share.first),
            size(share.weight_bytes),
            size(share.token_bytes) if share.token_bytes else "",
            size(share.state_bytes) if share.state_bytes else "",
        )
        for number, share in enumerate(shares.stages, 1)
    )
    columns = ("stage#", "layers", "weights#", "keys and values per token#", "state per sequence#")
    tensors = "one tensor" if shares.values == 1 else f"{shares.values} tensors"
    note = f"A stage passes on {tensors}, {size(shares.crossing_bytes)} per token."
    return [Section("Each rank of a stage holds", columns, rows, note)]


def _parts(shares: RankShares) -> Section:
    over = shares.even_share
    rows: list[tuple[str | Styled, ...]] = [
        (
            "weights, as stored" if shares.are_stored else "weights",
            size(shares.weight_bytes),
            size(shares.rank_weight_bytes),
            Styled(f"{over:.3f} × 1/{shares.ranks}", "good" if over <= MOST_OVER else "warn"),
        )
    ]
    for whole, (held, over) in shares.experts.items():
        rows.append(("routed experts", str(whole), str(held), f"1/{over} of each" if over > 1 else ""))
    for whole, held in shares.kv_heads.items():
        note = f"{shares.ranks // whole} ranks hold each" if held * shares.ranks > whole else ""
        note = "all of them" if held == whole else note
        rows.append(("KV heads", str(whole), str(held), note))
    for name, whole, held in (
        ("keys and values per token", shares.whole_token_bytes, shares.token_bytes),
        ("state per sequence", shares.whole_state_bytes, shares.state_bytes),
    ):
        if whole:
            rows.append((name, size(whole), size(held), f"{held * shares.ranks / whole:.3f} × 1/{shares.ranks}"))
    return Section(f"Each of {shares.ranks} ranks holds", ("!", "model#", "rank#", "share"), tuple(rows))


def _exchanges(shares: RankShares) -> Section:
    rows = tuple(
        (found.operator, str(found.count), size(found.decode_bytes), size(found.prompt_bytes))
        for found in shares.exchanges
    )
    columns = ("collective!", "a step#", "bytes of a decode step#", "per prompt token#")
    note = "Bytes of the results on each rank; a decode step is that of one sequence."
    return Section("Collectives", columns, rows, note)


def _whole(shares: RankShares) -> Section:
    rows, rest, count = [], 0, 0
    for weight in shares.whole:
        held = weight.size * weight.count
        if held < LEAST_SHARE * shares.rank_weight_bytes:
            rest, count = rest + held, count + weight.count
            continue
        sizes = " × ".join(map(str, weight.shape))
        rows.append((times(weight.module, weight.count), sizes, size(held), weight.reason))
    if rest:
        rows.append((f"{count} smaller ones", "", size(rest), "norms, biases and tables"))
    return Section("Weights that every rank holds whole", ("module", "sizes", "bytes#", "why"), tuple(rows))
