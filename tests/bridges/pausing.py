"""The part of vLLM's EngineClient that pauses and resumes, as the guard's tests have it."""

from __future__ import annotations


class Pausing:
    paused = False

    async def is_paused(self):
        return self.paused

    @property
    def engine_core(self):
        return self

    async def pause_scheduler_async(self, *, mode, clear_cache):
        assert (mode, clear_cache) == ("keep", False)
        self.paused = True

    async def resume_generation(self):
        self.paused = False
