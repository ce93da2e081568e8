"""lm-evaluation-harness: what it finds through ``/v1/completions`` is what it finds with transformers."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from served import MODEL, ROOT, Served

# Behind all others, as benchmarks/ is.
sys.path.append(str(ROOT / "examples"))

from pydoc_text import is_prose, paragraphs, reference_texts

pytestmark = pytest.mark.acceptance

TASKS = Path(__file__).with_name("tasks")
CONTEXT = 1024


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tasks' files, made of the language reference that comes with Python."""
    folder = tmp_path_factory.mktemp("lm_eval")
    texts = ["\n\n".join(filter(is_prose, paragraphs(text))) for _, (text,) in reference_texts()]
    pairs = list(sentence_pairs(texts))[:60]
    draw = random.Random(0)
    rows: list[dict[str, Any]] = []
    for first, second in pairs:
        choices = draw.sample([other for _, other in pairs if other != second], 3)
        label = draw.randrange(4)
        rows.append({"context": first, "choices": [*choices[:label], second, *choices[label:]], "label": label})
    # The longest ones take several windows, the others one.
    documents = [{"text": text[:12_000]} for text in sorted(texts, key=len) if text]
    for name, lines in (("continuation", rows), ("documents", [*documents[20:60:8], *documents[-3:]])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def sentence_pairs(texts: list[str]) -> Iterator[tuple[str, str]]:
    """Two sentences that follow on one another."""
    for text in texts:
        for paragraph in text.split("\n\n"):
            first, _, rest = paragraph.partition(". ")
            second = re.split(r"(?<=[.:!?]) ", rest)[0]
            if 30 < len(first) < 300 and 20 < len(second) < 120:
                yield f"{first}.", second


def evaluate(run_client: Callable[..., Any], data: Path, kind: str, **options: Any) -> tuple[dict[str, float], Any]:
    """Metrics, and what each sample was given, by task."""
    names = sorted(path.stem for path in TASKS.glob("*.yaml"))
    arguments = ["-m", "lm_eval", "run", "--model", kind, "--model_args"]
    arguments += [",".join(f"{name}={value}" for name, value in options.items())]
    arguments += ["--include_path", str(TASKS), "--tasks", ",".join(names), "--device", "cpu"]
    arguments += ["--output_path", kind, "--log_samples"]
    run_client("lm-eval", *arguments, cwd=data, HF_DATASETS_OFFLINE="1", HF_HOME=str(data / "huggingface"))
    (path,) = data.glob(f"{kind}/*/results_*.json")
    metrics = {
        f"{task} {name.removesuffix(',none')}": value
        for task, values in json.loads(path.read_text())["results"].items()
        for name, value in values.items()
        if name.endswith(",none") and "stderr" not in name
    }
    samples = {}
    for name in names:
        (path,) = data.glob(f"{kind}/*/samples_{name}_*.jsonl")
        lines = sorted(map(json.loads, path.read_text().splitlines()), key=lambda line: line["doc_id"])
        samples[name] = [line["filtered_resps"] for line in lines]
    return metrics, samples


def test_ours_and_transformers_agree(
    run_client: Callable[..., Any], server: Served, data: Path, report: Callable[..., None]
) -> None:
    ours, our_samples = evaluate(
        *(run_client, data, "local-completions"),
        model="tiny",
        base_url=f"{server.url}/v1/completions",
        tokenizer_backend="huggingface",
        tokenizer=MODEL,
        max_length=CONTEXT,
        num_concurrent=4,
    )
    # The harness takes two tokens off the context of an API.
    theirs, their_samples = evaluate(
        run_client, data, "hf", pretrained=MODEL, dtype="float32", max_length=CONTEXT - 2
    )
    assert ours.keys() == theirs.keys() and len(ours) == 6
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours["pydoc_continuation acc"] > 0.4, "one of four would be chance"

    pairs = [
        (float(our[0]), float(their[0]), our[1] == their[1])
        for our_sample, their_sample in zip(
            *(s["pydoc_continuation"] for s in (our_samples, their_samples)), strict=True
        )
        for our, their in zip(our_sample, their_sample, strict=True)
    ]
    assert len(pairs) == 240 and all(same for *_, same in pairs), "whether the likeliest tokens make the sentence"
    rolling = [
        (float(our[0]), float(their[0]))
        for our, their in zip(*(s["pydoc_perplexity"] for s in (our_samples, their_samples)), strict=True)
    ]
    worst = max(abs(our - their) for our, their, *_ in pairs)
    worst_rolling = max(abs(our / their - 1) for our, their in rolling)
    assert worst < 1e-3 and worst_rolling < 1e-5
    assert our_samples["pydoc_generation"] == their_samples["pydoc_generation"]

    version = run_client("lm-eval", "-c", "from importlib.metadata import version; print(version('lm-eval'))").stdout
    figures = "; ".join(f"{name} {ours[name]:.6g} / {theirs[name]:.6g}" for name in ours)
    result = f"ours / hf: {figures}; 240 log-likelihoods differ by at most {worst:.1e}, {len(rolling)} documents' by "
    result += f"{worst_rolling:.1e} of them; 60 generated texts equal"
    report("lm-eval", version.strip(), "local-completions beside --model hf: 3 local tasks, float32", result)
