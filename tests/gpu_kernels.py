"""What vLLM's kernels for a GPU compute of random logits, as JSON; test_vllm_gpu.py starts it under vLLM's interpreter.

The vocabulary takes several blocks of a kernel, unlike that of the model which ships with the project.
"""

import json

import torch
from vllm.triton_utils import HAS_TRITON
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

assert HAS_TRITON  # or the functions would be others
VOCABULARY, SEEDS = 2500, 200
torch.manual_seed(0)
logits = 4 * torch.randn(4, VOCABULARY)
logits[1] -= 1e4
tokens = torch.randint(VOCABULARY, (4, 3))
kept = apply_top_k_top_p(logits.clone(), torch.full((4,), 500), None)
of_top = logits.topk(500).indices
expected = torch.full_like(logits, -torch.inf).scatter(1, of_top, logits.gather(1, of_top))
found = {"top_k_is_right": torch.equal(kept, expected)}
for dtype in (torch.float32, torch.bfloat16):
    some = logits.to(dtype)
    error = compute_token_logprobs(some, tokens) - some.double().log_softmax(-1).gather(1, tokens)
    found[f"error_{dtype}"] = error.abs().max().item()

places, p = torch.tensor([3, 1500, 2047, 2499]), torch.tensor([0.5, 0.3, 0.15, 0.05])
row = torch.full((VOCABULARY,), -torch.inf).scatter(0, places, p.log())
requests, ones = torch.arange(SEEDS), torch.ones(SEEDS)
found["p"], found["drawn"] = p.tolist(), []
for position in (7, 8):  # each request has its seed, which follows that of the request before it
    positions = torch.full((SEEDS,), position)
    drawn = gumbel_sample(row.repeat(SEEDS, 1), requests, ones, requests + 2**31, positions, False, False)
    found["drawn"].append(torch.searchsorted(places, drawn).tolist())
print(json.dumps(found))
