"""The plan of the long-context study: a TOML file that names target, budget and arms, checked before hours go into it.

In: the file, and the folders of data and results. Out: a `Plan`, or a UserError that says what is wrong with the file.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field

from hyflash import drafters
from hyflash.data.disk import read_json, write_json
from hyflash.errors import UserError, nearest
from hyflash.options import Options
from hyflash.train.recipe import changes, load_recipe

ROOT = Path(__file__).resolve().parents[1]
COST_TOKENS = 64
"""Tokens that are decoded where times are taken."""


class Arm(Options):
    """A drafter of the study: one that is trained, or another one's checkpoint read by a training-free method."""

    name: str = Field(pattern=r"^\w[\w.-]*$", description="name in tables and of directories")
    recipe: str = Field("", description="recipe that it is trained by")
    options: tuple[str, ...] = Field((), description="overrides of the recipe, KEY=VALUE")
    over: str = Field("", description="METHOD:ARM, for training-free arms")
    seeds: tuple[int, ...] = Field((0,), min_length=1, description="seeds of training")


class Plan(Options):
    """The TOML file, and where things are."""

    target: str = Field(description="target of all arms")
    contexts: tuple[int, ...] = Field(min_length=1, description="tokens of prompt and answer in the test")
    answer_tokens: int = Field(ge=1, description="most tokens of an answer")
    draft_tokens: int = Field(ge=1, description="draft tokens per round")
    short_prompts: int = Field(ge=1, description="short prompts answered for training")
    long_prompts: int = Field(ge=1, description="long prompts answered for training")
    per_kind: int = Field(ge=1, description="long prompts made for training, of each kind")
    tune_prompts: int = Field(ge=2, description="other long prompts, by which training-free arms choose their options")
    per_cell: int = Field(ge=1, description="prompts of the test, of each kind and context")
    training: tuple[str, ...] = Field((), description="overrides of all recipes, KEY=VALUE")
    capture: str = Field(description="recipe whose drafter reads all that the arms read, keys and values included")
    base: str = Field(description="the arm that others are compared with")
    arms: tuple[Arm, ...]
    data: Path
    out: Path

    def trained(self) -> Iterable[tuple[Arm, int, Path]]:
        """Arms with a recipe, seed by seed, and the directory of the run."""
        return ((arm, seed, self.out / f"{arm.name}-{seed}") for arm in self.arms if arm.recipe for seed in arm.seeds)

    def drafters(self) -> dict[str, str]:
        """Arm and seed -> what names its drafter on the command line."""
        found = {f"{arm.name}-{seed}": str(run / "best") for arm, seed, run in self.trained()}
        for arm in self.arms:
            if arm.over:
                for seed in arm.seeds:
                    own = self.out / f"{arm.name}-{seed}"
                    found[own.name] = str(own) if own.exists() else self.untuned(arm, seed)
        return found

    def untuned(self, arm: Arm, seed: int) -> str:
        """What names a training-free arm's drafter as it is by default, and where no option made a difference."""
        method, _, under = arm.over.partition(":")
        return f"{method}:{self.out / f'{under}-{seed}' / 'best'}"

    def first_drafters(self) -> list[str]:
        """Of each arm that of its first seed."""
        drafters = self.drafters()
        return [drafters[f"{arm.name}-{arm.seeds[0]}"] for arm in self.arms]

    def overrides(self, arm: Arm, seed: int) -> list[str]:
        """Of an arm's recipe."""
        shards = json.dumps([str(self.out / "short-shards"), str(self.out / "long-shards")])
        own = (f"data.shards={shards}", f"target.name={self.target}", f"train.seed={seed}")
        return [*own, *self.training, *arm.options]


def read_plan(path: Path, data: Path, out: Path) -> Plan:
    """The plan of a TOML file, every recipe and override of it checked. Raises UserError."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise UserError(f"{path}: cannot be read ({err.strerror or err}); expected the study's plan in TOML.") from err
    except ValueError as err:
        raise UserError(f"{path}: is not valid TOML: {err}.") from err
    if own := sorted({"arms", "data", "out"} & table.keys()):
        raise UserError(f"{path}: has {own[0]}; expected [[arm]] tables, and the folders on the command line.")
    arms = table.pop("arm", None)
    if not isinstance(arms, list) or not arms or not all(isinstance(arm, dict) for arm in arms):
        raise UserError(f"{path}: has no [[arm]] table; expected one for each drafter of the study.")
    parsed = tuple(Arm.parse(arm, where=f"{path}, arm {arm.get('name', i + 1)}") for i, arm in enumerate(arms))
    plan = Plan.parse({**table, "arms": parsed, "data": data.resolve(), "out": out.resolve()}, where=str(path))
    _check(plan, path)
    return plan


def _check(plan: Plan, where: Path) -> None:
    """Refuse now what would end the study hours later. Raises UserError."""
    names = [arm.name for arm in plan.arms]
    if len(set(names)) < len(names):
        raise UserError(f"{where}: two arms have the same name; expected a name of its own for each.")
    if plan.base not in names:
        raise UserError(f"{where}: base is {plan.base!r}, which is no arm.{nearest(plan.base, names)}")
    if least := [c for c in plan.contexts if c < plan.answer_tokens + COST_TOKENS]:
        raise UserError(
            f"{where}: a context of {least[0]} tokens has no room for {plan.answer_tokens} of the answer; expected at "
            f"least {plan.answer_tokens + COST_TOKENS}."
        )
    trained = {arm.name: arm for arm in plan.arms if arm.recipe}
    if not trained:
        raise UserError(f"{where}: no arm has a recipe; expected one at least, whose layers are captured.")
    load_recipe(ROOT / plan.capture)
    for arm in plan.arms:
        if bool(arm.recipe) == bool(arm.over):
            found = "both" if arm.recipe else "neither"
            raise UserError(f"{where}, arm {arm.name}: expected either recipe or over, found {found}.")
        if arm.recipe:
            for seed in arm.seeds:
                load_recipe(ROOT / arm.recipe, plan.overrides(arm, seed))
            continue
        method, _, under = arm.over.partition(":")
        if method not in drafters.names() or under not in trained:
            raise UserError(f"{where}, arm {arm.name}: over is {arm.over!r}; expected METHOD:ARM of a trained arm.")
        if arm.options or set(arm.seeds) - set(trained[under].seeds):
            raise UserError(
                f"{where}, arm {arm.name}: is not trained, so it has no options, and seeds {under} has been trained "
                f"with, {list(trained[under].seeds)}."
            )


def keep_plan(plan: Plan) -> None:
    """Note the plan beside its results; arms and seeds may be added later, the rest may not. Raises UserError."""
    path = plan.out / "plan.json"
    facts = plan.model_dump(mode="json", exclude={"data", "out", "base", "arms"})
    facts["arm"] = {arm.name: arm.model_dump(mode="json", exclude={"name", "seeds"}) for arm in plan.arms}
    old = read_json(path) if path.exists() else facts
    known = old.get("arm", {})
    both = {name: arm for name, arm in facts["arm"].items() if name in known}
    found = changes({**old, "arm": {name: known[name] for name in both}}, {**facts, "arm": both})
    if found:
        raise UserError(
            f"{plan.out}: holds results of another plan: {'; '.join(found[:5])}. Give another --out, or the old plan."
        )
    write_json(path, {**facts, "arm": {**known, **facts["arm"]}})
