"""OpenVINO GenAI's continuous batching as a worker; the model is one that ``optimum-cli export openvino`` wrote."""

from __future__ import annotations

import argparse
import os

import numpy as np
import openvino
import openvino_genai
from protocol import Generate, serve


def load(args: argparse.Namespace) -> Generate:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 4
    scheduler.max_num_seqs = 32
    scheduler.max_num_batched_tokens = 256
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    properties: dict[str, int | str] = {"INFERENCE_NUM_THREADS": args.threads}
    held = os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2"
    if held:
        # It asks the processor whether there is bf16, and then oneDNN, which has none.
        properties["INFERENCE_PRECISION_HINT"] = "f32"
    if held or args.weights.endswith("-weight-only"):
        # By default it rounds inputs to 8 bits, in groups, where it multiplies with rounded weights; not on AVX2.
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
    pipeline = openvino_genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties)

    def generate(prompts: list[list[int]], outputs: list[int]) -> list[int]:
        ids = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        configs = []
        for count in outputs:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = count
            config.ignore_eos = True
            config.do_sample = False
            configs.append(config)
        found = pipeline.generate(ids, configs)
        return [len(result.m_generation_ids[0]) for result in found]

    return generate


serve(load)
