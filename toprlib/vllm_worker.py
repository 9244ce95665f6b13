"""A process that samples with vLLM for vllm_client.py.

It imports vLLM and nothing of this project, so that its interpreter needs nothing else.
"""

import json
import os
import signal
import sys
import threading
import time
from typing import Any


def main() -> None:
    """Load a model, answer null, then answer requests until standard input ends.

    Arguments: those of vLLM's LLM as JSON, and the process id of the client.
    """
    threading.Thread(target=_end_with_client, args=(int(sys.argv[2]),), daemon=True).start()
    sys.path.pop(0)  # this folder, whose modules may have the names of others
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # everything that is printed is a message, not an answer
    import vllm

    llm = vllm.LLM(enable_prefix_caching=True, **json.loads(sys.argv[1]))
    print("null", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(llm, json.loads(line))), file=answers, flush=True)
    _end_group()


def _answer(llm: Any, request: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The completions of each prompt of a request."""
    import vllm

    options = {"n": request["n"], "logprobs": 0, **request["sampling"]}  # of sampled tokens only
    prompts = []
    parameters = []
    for i, token_ids in enumerate(request["prompts"]):
        prompts.append({"prompt_token_ids": token_ids})
        seed = request["seed"] + i * request["n"]  # vLLM adds j for completion j
        parameters.append(vllm.SamplingParams(seed=seed, **options))
    answer = []
    for output in llm.generate(prompts, parameters, use_tqdm=False):
        answer.append([_to_fields(completion) for completion in output.outputs])
    return answer


def _to_fields(completion: Any) -> dict[str, Any]:
    """Fields of a sample, from a vllm.CompletionOutput."""
    token_logmu = []
    for token, logprobs in zip(completion.token_ids, completion.logprobs, strict=True):
        token_logmu.append(round(logprobs[token].logprob, 7))
    return {
        "token_ids": list(completion.token_ids),
        "token_logmu_engine": token_logmu,
        "finish_reason": completion.finish_reason,
    }


def _end_with_client(client: int) -> None:
    """End when the client is gone, even in the middle of a request: vLLM holds a GPU."""
    while os.getppid() == client:
        time.sleep(1)
    _end_group()


def _end_group() -> None:
    """End this process and those that vLLM has started, which may not end by themselves."""
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
