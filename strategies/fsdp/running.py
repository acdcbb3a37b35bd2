"""The steps and backwards of a sharded module: parameters are gathered while they run, and at rest between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from .engines.base import Engine
from .steps.outside_calls import inside
from .units.sharded_root import ShardedForm, explained_mixture
from .units.unit_wrappers import explained_recomputation

T = TypeVar("T")


class Running:
    """Runs the steps of one sharded module.

    Args:
        engine: What sharded it.
        form: The sharded module.
        is_manual: Whether it optimizes manually; it may change between fits.
    """

    def __init__(self, engine: Engine[Any], form: ShardedForm, is_manual: Callable[[], bool]) -> None:
        self._engine, self._form, self._is_manual = engine, form, is_manual
        self._accumulating = False
        self.resharded_before_backward = False
        """Whether hooks before backward see parameters at rest."""
        self.kept_gathered = False
        """Whether what a micro-batch gathers serves the next one of its window."""

    def train(self, step: Callable[[], T]) -> T:
        """Run a training step."""
        root, path, manual = self._form.root, self._engine.path, self._is_manual()
        self._engine.begin_step(root)
        if not manual:
            path.forget()
            path.begin(("train", self._accumulating))
        self._engine.in_step = not manual
        try:
            result = self._run(step, reshard=self.resharded_before_backward or manual)
        finally:
            self._engine.in_step = False
        if not manual:  # else before each backward: hooks come between the two
            self._engine.end_step(root)
        return result

    def evaluate(self, stage: str, step: Callable[[], T]) -> T:
        """Run a validation, test or predict step.

        Args:
            stage: Which of them.
            step: The module's.
        """
        if not self._form.has_root_unit:
            return self._run(step, reshard=True)
        path = self._engine.path
        path.begin(stage)

        def to_its_end() -> T:
            result = step()
            path.end()
            return result

        return self._run(to_its_end, reshard=True)

    def _run(self, step: Callable[[], T], *, reshard: bool) -> T:
        """Run one of the module's steps, around which the root's unit is gathered, if there is one.

        Where there is none (manual optimization), each call inside of the step gathers what it needs.
        """
        root = self._form.root
        with inside if self._form.has_root_unit else nullcontext():
            try:
                result = step()
            except BaseException as error:  # whoever catches it may save, evaluate and fit again
                instead = self._engine.explained(error)
                self._engine.make_idle(root)
                if instead is not None:
                    raise instead from error
                raise
        if reshard:
            self._engine.reshard(root)
        return result

    def before_backward(self) -> None:
        """End what the step opened; hooks come between this and the backward."""
        if self._is_manual():
            self._engine.end_step(self._form.root)

    def backward(self, run: Callable[[], None], *, keeps_graph: bool) -> None:
        """Run a backward; gradients are what one process would have when it ends, if it reduces them.

        Args:
            run: The backward.
            keeps_graph: Whether there may be another one of the same graph.
        """
        root = self._form.root
        self._engine.begin_backward(root)
        with inside:
            try:
                if self._is_manual():
                    self._engine.path.begin("backward")
                run()
                self._engine.path.end()
            except BaseException as error:
                self._engine.make_idle(root)
                instead = explained_mixture(error) or explained_recomputation(error) or self._engine.explained(error)
                if instead is not None:
                    raise instead from error
                raise
            self._engine.end_backward(root, reduced=not self._accumulating)
            if keeps_graph:
                self._engine.keep_graph()
            if not (self.kept_gathered and self._accumulating):  # a step follows: also units that this batch left out
                self._engine.reshard(root)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Run a micro-batch whose gradients are not reduced."""
        self._accumulating = True
        try:
            with self._engine.no_sync(self._form.root):
                yield
        finally:
            self._accumulating = False
