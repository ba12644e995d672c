"""The suite that any rollout engine and weight transport must pass. numpy and the standard library only.

    import pytest
    from bridges.conformance import CHECKS, EngineUnderTest

    @pytest.fixture(scope="module")
    def under_test():
        engine, transport = MyEngine(...), MyTransport()
        transport.open(engine)
        yield EngineUnderTest(engine, transport, source=my_random_weights)
        engine.close()

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_conformance(check, under_test):
        check(under_test)

`check_engine(engine, transport, make_source)` runs all checks without pytest and lists those that failed.
The first check needs a fresh engine: keep their order.
"""

from __future__ import annotations

from collections.abc import Callable

from bridges.api import RolloutEngine, WeightSource, WeightTransport
from bridges.conformance.checks import CHECKS, Check, EngineUnderTest

__all__ = ["CHECKS", "Check", "ConformanceFailed", "EngineUnderTest", "check_engine"]


class ConformanceFailed(AssertionError):
    """An engine that breaks the contract. failures: check -> its message. passed: the names of the others."""

    def __init__(self, failures: dict[str, str], passed: tuple[str, ...]):
        self.failures, self.passed = failures, passed
        lines = "".join(f"\n  {name}: {message}" for name, message in failures.items())
        super().__init__(f"{len(failures)} of {len(CHECKS)} checks failed:{lines}")


def check_engine(engine: RolloutEngine, transport: WeightTransport,
                 make_source: Callable[[int], WeightSource], prompt_tokens: int = 40) -> tuple[str, ...]:
    """Open `transport` on a fresh engine and run every check -> the names of the checks that passed.

    make_source and prompt_tokens: as `EngineUnderTest` has them. Raises ConformanceFailed, which lists all
    failed checks, after the last one has run.
    """
    transport.open(engine)
    under_test = EngineUnderTest(engine, transport, make_source, prompt_tokens)
    failures = {check.__name__: message for check in CHECKS if (message := _failure(check, under_test))}
    passed = tuple(check.__name__ for check in CHECKS if check.__name__ not in failures)
    if failures:
        raise ConformanceFailed(failures, passed)
    return passed


def _failure(check: Check, under_test: EngineUnderTest) -> str:
    try:
        check(under_test)
    except AssertionError as e:
        return str(e) or "its assertion does not hold"
    except Exception as e:  # an engine that breaks the contract may raise anything
        return f"{type(e).__name__}: {e}"
    return ""
