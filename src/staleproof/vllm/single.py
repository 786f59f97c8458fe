"""Hooks on single objects, for methods that vLLM calls once a request: other objects pay nothing for them."""

from __future__ import annotations

from typing import Any

from staleproof.vllm import hooks


def hook(patch: str, thing: Any) -> None:
    """Put the hooks of a patch's targets that are ``single`` on one object; twice changes nothing.

    They end when the patch steps back or is reverted.

    Args:
        patch: its name.
        thing: an object of the class of such a target.

    >>> hook("no patch", object())
    """
    for place in hooks._places.values():
        for one in place.hooks:
            if one.patch.name == patch and one.target.single and isinstance(thing, place.holder):
                setattr(thing, place.attribute, _method(one, thing, getattr(type(thing), place.attribute)))


def _method(one: hooks._Hook, thing: Any, original: Any) -> Any:
    wrapped = hooks._wrapped(original, one)

    def call(*args: Any, **kwargs: Any) -> Any:
        run = wrapped if one.patch.targets else original
        return run(thing, *args, **kwargs)

    return call
