"""As much of vLLM's interface as vllm_worker.py uses, without a model.

Token t of completion j is the seed plus j plus t, and its log-probability is -1 / (t + 1). It
prints the environment and what it is asked, and has a process of its own, which does not end by
itself.
"""

import json
import os
import subprocess
from types import SimpleNamespace


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, **arguments):
        print(json.dumps({"environment": dict(os.environ), "arguments": arguments}))
        if arguments["max_model_len"] > 1000:
            raise ValueError("max_model_len is too large")
        self.process = subprocess.Popen(["sleep", "1000"])

    def generate(self, prompts, sampling_params, use_tqdm):
        print(
            json.dumps({"prompts": prompts, "sampling": [vars(each) for each in sampling_params]})
        )
        if sampling_params[0].seed == 666:
            os._exit(3)
        outputs = []
        for prompt, params in zip(prompts, sampling_params, strict=True):
            length = min(params.max_tokens, len(prompt["prompt_token_ids"]))
            completions = [complete(params.seed + j, length) for j in range(params.n)]
            outputs.append(SimpleNamespace(outputs=completions))
        return outputs


def complete(seed, length):
    token_ids = tuple(range(seed, seed + length))
    logprobs = []
    for t, token in enumerate(token_ids):
        logprobs.append({token: SimpleNamespace(logprob=-1 / (t + 1))})
    return SimpleNamespace(token_ids=token_ids, logprobs=logprobs, finish_reason="length")
