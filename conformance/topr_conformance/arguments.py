"""Which parameter of a loss is which argument: by its name, or else by trying the orders."""

import inspect
import re
from collections.abc import Callable, Sequence
from inspect import Parameter
from itertools import permutations
from typing import NamedTuple

from torch import Tensor

from topr_conformance.losses import InputError

AnyLoss = Callable[..., object]  # a user's loss in any known form

ARGUMENTS = ("logp", "logmu", "reward", "mask")  # the order in which a loss takes them
LENGTH_NAME = r"len|num|(?<![a-z])n_"
LABELS_NAME = r"label"
# A pattern in a parameter's name -> what the parameter is. The first that fits counts. The values
# are ARGUMENTS, "log-probabilities" and the keys of NO_ARGUMENT.
NAME_PATTERNS = {
    "mask": "mask",
    LENGTH_NAME: "mask",  # the number of tokens is the mask in another form
    LABELS_NAME: "mask",  # so are labels, which are -100 elsewhere
    "logit": "logits",
    r"tokens?$|ids?$|input|hidden": "tokens",
    r"(?<![a-z])kl(?![a-z])|(?<![a-z])ratio|log_?ratio|weight": "ratio",
    "reward|adv|return|score": "reward",
    r"(?<![a-z])(eps|beta|coef|config|cfg|temperature)|clip": "setting",
    "(?<![a-z])(old|prev|ref|infer|prior|stale|vllm)|behav|sampl|rollout|generat": "logmu",
    r"(?<![a-z])mu|log_?mu|mu(?![a-z])": "logmu",
    r"(?<![a-z])(new|cur)|(?<![a-z])(pi|theta)(?![a-z])|log_?pi(?![a-z])": "logp",
    r"^(token_)?logp$": "logp",
    # Either policy; the name of the other parameter decides.
    r"log|(?<![a-z])lp|policy|target|actor|trainer": "log-probabilities",
}
# Another meaning of a parameter -> why the loss cannot be checked with it
NO_ARGUMENT = {
    "logits": "it is logits, and the checker has log-probabilities of the tokens only",
    "tokens": "it is an input or output of a model, and the checker has log-probabilities only",
    "ratio": "it is a ratio, a KL or a weight, and the checker has log-probabilities only",
    "setting": "it is a setting: bind it with functools.partial",
    "": "its name does not say what it is",
}


def argument_of(name: str) -> str:
    """The meaning of a parameter's name, as in NAME_PATTERNS; "" if it has none.

    >>> argument_of("old_log_probs"), argument_of("advantages"), argument_of("beta")
    ('logmu', 'reward', 'setting')
    """
    for pattern, argument in NAME_PATTERNS.items():
        if re.search(pattern, name.lower()):
            return argument
    return ""


class Parameters(NamedTuple):
    """The parameters of a loss that get an argument, in their order."""

    names: tuple[str, ...]
    by_keyword: bool  # whether they are passed by their names


def parameters_of(loss: AnyLoss) -> Parameters:
    """All parameters without a default, and as many others as are needed for the four arguments.

    >>> parameters_of(lambda new, old, adv, mask=None, config=None: ...).names
    ('new', 'old', 'adv', 'mask')
    """
    try:
        function = getattr(loss, "forward", loss)  # of a torch.nn.Module
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # it has no signature, as torch.add
        return Parameters(ARGUMENTS, by_keyword=False)
    kinds = [parameter.kind for parameter in parameters]
    if Parameter.VAR_POSITIONAL in kinds:  # *arguments take what is left of the four
        names = [
            parameter.name for parameter in parameters[: kinds.index(Parameter.VAR_POSITIONAL)]
        ]
        rest = [f"argument {i}" for i in range(len(names) + 1, len(ARGUMENTS) + 1)]
        return Parameters((*names, *rest), by_keyword=False)
    named = [parameter for parameter in parameters if parameter.kind != Parameter.VAR_KEYWORD]
    taken = [parameter for parameter in named if parameter.default is parameter.empty]
    known = {argument_of(parameter.name) for parameter in taken}
    for parameter in named:
        argument = argument_of(parameter.name)
        is_needed = len(taken) < len(ARGUMENTS) and argument not in known | set(NO_ARGUMENT)
        if parameter not in taken and is_needed:
            taken.append(parameter)
            known.add(argument)
    taken = [parameter for parameter in named if parameter in taken]
    is_first = taken == named[: len(taken)]
    by_keyword = not is_first or any(p.kind == Parameter.KEYWORD_ONLY for p in taken)
    return Parameters(tuple(parameter.name for parameter in taken), by_keyword)


# ---- which order: the arguments of a loss's parameters -------------------------------------------
Order = tuple[str, ...]  # of ARGUMENTS


def possible_orders(names: Sequence[str]) -> list[list[Order]]:
    """The orders that the names of four parameters allow: groups, the most likely one first.

    The orders of a group differ only in logp and logmu. Raises InputError if a name means something
    else, or if no order fits.

    >>> possible_orders(["prev", "log_probs", "adv", "mask"])
    [[('logmu', 'logp', 'reward', 'mask')]]
    >>> possible_orders(["a", "b", "adv", "mask"])
    [[('logp', 'logmu', 'reward', 'mask'), ('logmu', 'logp', 'reward', 'mask')]]
    """
    meanings = [argument_of(name) for name in names]
    _check_parameters(names, meanings)
    groups: dict[tuple[int, int], list[Order]] = {}
    for order in permutations(ARGUMENTS):
        if _is_allowed(order, meanings):
            group = groups.setdefault((order.index("reward"), order.index("mask")), [])
            group.append(order)
    if not groups:
        readings = ", ".join(
            f"{name} as {meaning}" for name, meaning in zip(names, meanings, strict=True)
        )
        raise InputError(
            f"the loss needs parameters for {', '.join(ARGUMENTS)}; by their names it has "
            f"{readings}: call it in a copy of topr_conformance/example.py"
        )
    return list(groups.values())


def _check_parameters(names: Sequence[str], meanings: Sequence[str]) -> None:
    for name, meaning in zip(names, meanings, strict=True):
        is_other = meaning in NO_ARGUMENT and (meaning or len(names) > len(ARGUMENTS))
        if is_other:
            raise InputError(
                f"the loss needs {name}: {NO_ARGUMENT[meaning]}; "
                "call it in a copy of topr_conformance/example.py"
            )
    if len(names) != len(ARGUMENTS):
        raise InputError(
            f"the loss takes {', '.join(names) or 'nothing'}: it needs {', '.join(ARGUMENTS)}, "
            "or one batch that has them; call it in a copy of topr_conformance/example.py"
        )


def _is_allowed(order: Order, meanings: Sequence[str]) -> bool:
    for argument, meaning in zip(order, meanings, strict=True):
        is_unique = list(meanings).count(meaning) == 1
        if meaning in ("reward", "mask") and argument != meaning:
            return False
        if meaning in ("logp", "logmu", "log-probabilities") and argument in ("reward", "mask"):
            return False
        if meaning in ("logp", "logmu") and is_unique and argument != meaning:
            return False
    return True


def describe_order(order: Order, names: Sequence[str]) -> str:
    """The parameter of each argument, in the order of ARGUMENTS.

    >>> describe_order(("logmu", "logp", "reward", "mask"), ["prev", "curr", "adv", "mask"])
    'logp = curr, logmu = prev, reward = adv, mask = mask'
    """
    name_of = dict(zip(order, names, strict=True))
    return ", ".join(f"{argument} = {name_of[argument]}" for argument in ARGUMENTS)


# ---- a batch in one argument ---------------------------------------------------------------------
class Batch(dict[str, Tensor]):
    """The arguments of a loss as keys and attributes, under any name in NAME_PATTERNS.

    used: the names that a loss has looked up, and the argument of each.
    """

    def __init__(self, arguments: dict[str, Tensor], used: dict[str, str]) -> None:
        super().__init__()
        self._arguments = arguments
        self._used = used

    def _look_up(self, name: str) -> Tensor | None:
        argument = argument_of(name)
        if argument == "log-probabilities":
            argument = "logp"
        if argument not in ARGUMENTS:
            return None
        self._used[name] = argument
        return self._arguments[argument]

    def get(self, name: str, default: Tensor | None = None) -> Tensor | None:
        """The argument of this name, or the default."""
        value = self._look_up(name)
        return default if value is None else value

    def __contains__(self, name: object) -> bool:
        return argument_of(str(name)) in (*ARGUMENTS, "log-probabilities")

    def __missing__(self, name: str) -> Tensor:
        value = self._look_up(name)
        if value is None:
            raise KeyError(name)
        return value

    def __getattr__(self, name: str) -> Tensor:
        value = None if name.startswith("__") else self._look_up(name)
        if value is None:
            raise AttributeError(f"the batch has no {name}")
        return value


def describe_batch(used: dict[str, str]) -> str:
    """The name of each argument in a batch. Raises InputError if two names mean one argument."""
    names_of: dict[str, list[str]] = {}
    for name, argument in used.items():
        names_of.setdefault(argument, []).append(name)
    for argument, names in names_of.items():
        if len(names) > 1:
            raise InputError(
                f"the loss reads {' and '.join(names)} of its batch, and both may be {argument}: "
                "call it in a copy of topr_conformance/example.py"
            )
    return ", ".join(f"{a} = {names_of[a][0]}" for a in ARGUMENTS if a in names_of)
