"""Small models, examples and batches for tests of the method."""

import math
import random

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import topr
from toprlib.records import Example

VOCABULARY = 32


def tiny_llama(seed=0, dtype=torch.float64):
    """An untrained Llama with a vocabulary of 32, far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def tiny_gpt2(seed=0):
    """An untrained GPT-2: its positions are absolute, so a shift of a row changes its logits."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5
    )
    return GPT2LMHeadModel(config).double().eval()


def random_examples(prompts, per_prompt, seed=0):
    """Examples of random tokens and lengths, with rewards of both signs and random log mu."""
    rng = random.Random(seed)
    examples = []
    for _ in range(prompts):
        prompt_ids = random_tokens(rng, most=9)
        for _ in range(per_prompt):
            completion_ids = random_tokens(rng, most=6)
            reward = rng.choice([-1.0, 1.0])
            token_logmu = [-rng.uniform(0.5, 6) for _ in completion_ids]
            sample = len(examples)
            example = Example(prompt_ids, completion_ids, reward, sample, sample, token_logmu)
            examples.append(example)
    return examples


def random_tokens(rng, most):
    return [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, most))]


def plain_batch(examples, filler=0, extra=0):
    """The examples as a float64 batch, made without `collate`.

    filler: the token id of padding. extra: columns of padding more than needed, on both sides.
    """
    prompts = [torch.tensor([filler] * extra + example.prompt_ids) for example in examples]
    completions = [torch.tensor(example.completion_ids + [filler] * extra) for example in examples]
    prompt_masks = [torch.ones(len(example.prompt_ids)) for example in examples]
    masks = [torch.ones(len(example.completion_ids)) for example in examples]
    values = [torch.tensor(example.token_logmu, dtype=torch.float64) for example in examples]
    input_ids = torch.cat([pad_left(prompts, filler), pad_right(completions, filler)], dim=1)
    width = max(len(completion) for completion in completions)
    mask = pad_right(masks, width=width)
    attention_mask = torch.cat([pad_left(prompt_masks), mask], dim=1)
    missing = input_ids.shape[1] - attention_mask.shape[1]
    attention_mask = torch.nn.functional.pad(attention_mask, (missing, 0))
    reward = torch.tensor([example.reward for example in examples], dtype=torch.float64)
    return topr.Batch(input_ids, attention_mask, mask, pad_right(values, width=width), reward)


def pad_left(rows, filler=0):
    return pad_sequence(rows, True, filler, "left")


def pad_right(rows, filler=0, width=0):
    padded = pad_sequence(rows, True, filler, "right")
    return torch.nn.functional.pad(padded, (0, max(width - padded.shape[1], 0)))


def unpadded_logprobs(model, example):
    """The log-softmax of each completion token at the position before it, without a batch."""
    ids = torch.tensor([example.prompt_ids + example.completion_ids])
    token_logp = model(ids).logits[0].log_softmax(-1)
    start = len(example.prompt_ids)
    values = []
    for offset, token in enumerate(example.completion_ids):
        values.append(token_logp[start + offset - 1, token])
    return torch.stack(values)


def flat_weights(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def flat_gradients(model):
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def rho(log_ratio, a, b):
    """The taper of Section 3.1 in Python numbers."""
    if a > 0 and log_ratio < math.log(a):
        return a * (1 + log_ratio - math.log(a))
    if math.exp(log_ratio) > b:
        return b * (1 + log_ratio - math.log(b)) if b > 0 else 0.0
    return math.exp(log_ratio)
