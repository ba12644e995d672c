"""Weights that clients saved, on the disk: `FOLDER/MODEL/weights/NAME` with the whole state, and
`FOLDER/MODEL/sampler_weights/NAME` with the policy alone. A client knows them as tinker://MODEL/weights/NAME.

Each is a checkpoint of jaxfp8rl.checkpoint.store: whole or absent, and compared with its digests before it is
read.
"""

from __future__ import annotations

import datetime
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple, cast

from jaxfp8rl.checkpoint.store import Checkpoints
from jaxfp8rl.errors import nearest
from jaxfp8rl.serving.refusal import Refused

BASE = "tinker://base/weights/all-parameters"  # the base model, as a state that training may begin from
STATE, SAMPLER = "weights", "sampler_weights"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MODEL = r"[0-9a-f-]{36}:train:\d+"
PATH = re.compile(rf"tinker://({MODEL})/({STATE}|{SAMPLER})/({NAME.pattern})")


class Place(NamedTuple):
    """A path of saved weights: the model that saved them, STATE or SAMPLER, and the name."""

    model_id: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"tinker://{'/'.join(self)}"


def place_of(path: str) -> Place:
    """Raises Refused for a path that this server does not write."""
    if not (found := PATH.fullmatch(path)):
        raise Refused(f"{path!r} is not a path of this server's weights",
                      f"tinker://MODEL/{STATE}/NAME or tinker://MODEL/{SAMPLER}/NAME, as a save returned it; "
                      f"the base model, as a state, is {BASE}")
    return Place(*found.groups())


class Saved:
    """The folder of a server's saved weights."""

    def __init__(self, folder: Path, base_model: str):
        self._folder, self._base_model = folder, base_model

    def save(self, place: Place, tree: Any, overwrite: bool, facts: dict[str, Any]) -> str:
        """Write `tree`; when this returns, it is durable -> its path. Raises Refused for a name that is no
        name of a file, or that is taken."""
        if not NAME.fullmatch(place.name):
            raise Refused(f"the name {place.name!r}: a name of weights has letters, digits, '.', '_' and "
                          "'-', 128 at most, and begins with a letter or a digit", "choose another name")
        folder = self._folder_of(place)
        if folder.exists() and not overwrite:
            raise Refused(f"{place} exists already",
                          "choose another name, or save_state(..., overwrite=True)")
        draft = folder.with_name(f".draft-{place.name}")
        shutil.rmtree(draft, ignore_errors=True)
        Checkpoints(draft, 1).save(0, tree, facts | {"base_model": self._base_model})
        if folder.exists():
            shutil.rmtree(old := folder.with_name(f".old-{place.name}"), ignore_errors=True)
            folder.rename(old)
            draft.rename(folder)
            shutil.rmtree(old)
        else:
            draft.rename(folder)
        return str(place)

    def check(self, place: Place) -> dict[str, Any]:
        """What was saved beside the weights. Raises Refused if there are none, or if they are another
        model's."""
        folder = self._folder_of(place)
        if not folder.is_dir():
            near = [p.name for p in folder.parent.glob("[!.]*")] if folder.parent.is_dir() else []
            raise Refused(f"{place}: no such weights{nearest(place.name, near) if near else ''}",
                          "give a path that save_state or save_weights_for_sampler returned", 404)
        facts = Checkpoints(folder, 1).loop_state()
        if facts.get("base_model") != self._base_model:
            raise Refused(f"{place} has weights of {facts.get('base_model')}, this server's model is "
                          f"{self._base_model}", "start a server of that model")
        return facts

    def load(self, place: Place, like: Any) -> Any:
        """The tree, placed and typed as `like`. Raises CheckpointError for damaged weights, and for those
        that do not fit; and as `check` does."""
        self.check(place)
        return cast(Any, Checkpoints(self._folder_of(place), 1).restore(like)[0])

    def delete(self, place: Place) -> None:
        """Raises Refused(404) if there are no such weights."""
        self.check(place)
        shutil.rmtree(self._folder_of(place))

    def newest(self, model_id: str) -> str | None:
        """When the model's newest weights were saved, in ISO 8601; None if it saved none."""
        if not re.fullmatch(MODEL, model_id) or not (folder := self._folder / model_id).is_dir():
            return None
        times = [p.stat().st_mtime for p in folder.glob("*/[!.]*")]
        return datetime.datetime.fromtimestamp(max(times), datetime.UTC).isoformat() if times else None

    def _folder_of(self, place: Place) -> Path:
        return self._folder.joinpath(*place)
