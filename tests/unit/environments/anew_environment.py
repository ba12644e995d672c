"""An environment that writes the conversation anew, with a tool, and has a reward due at the end."""

from jaxfp8rl.data.problem import Problem
from jaxfp8rl.environments.protocol import Anew

TOOL = {"type": "function", "function": {"name": "half", "description": "Halve a number.", "parameters": {
    "type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}}}


class Rewriting:
    def problems(self):
        return [Problem("0", ({"role": "user", "content": "a placeholder"},), "")]

    def reset(self, problem):
        self.turns, self.due = 0, 0.25
        return Anew([{"role": "system", "content": "You halve."}, {"role": "user", "content": "Begin."}],
                    [TOOL])

    def step(self, action):
        self.turns += 1
        if self.turns == 2:
            return Anew([{"role": "user", "content": f"Short: you said {action}"}]), 0.0, False
        return [{"role": "user", "content": "go on"}], 0.5, False

    def finish(self):
        return self.due

    def forget(self):
        self.due = 0.0
