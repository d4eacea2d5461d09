"""The means of deployment fit the code: the Helm chart as Helm renders it, systemd units, a SLURM script."""

from __future__ import annotations

import base64
import copy
import functools
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_ext.cli import COMMANDS, flags_of
from sglang_ext.config import KvConfig
from sglang_ext.launch_server import KEY_FILE_FLAG

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "sglang-ext"
KUBERNETES = "1.37"
Json = dict[str, Any]

needs_helm = pytest.mark.skipif(
    importlib.util.find_spec("helm_python") is None
    or importlib.util.find_spec("kubernetes_validate") is None,
    reason="helm-python-sdk or kubernetes-validate is not installed: make setup",
)


HELM = """
import json, sys
import helm_python as helm

chart, values = json.load(sys.stdin)
try:
    with helm.Chart.load(chart) as loaded:
        texts = loaded.render(values, name="kv", namespace="llm")
    print(json.dumps({"texts": list(texts.values()), "lint": helm.lint(chart, values)}))
except helm.HelmError as error:
    print(json.dumps({"error": str(error)}))
"""
"""In a process of its own: Helm is a library in Go, whose runtime keeps threads and files."""


SEEDED = {"keys": {"seed": "0123456789abcdef" * 2}}


@functools.cache
def helm(values: str) -> Json:
    """The chart as Helm renders it with these values (JSON)."""
    asked = json.dumps([str(CHART), json.loads(values)])
    done = subprocess.run(
        [sys.executable, "-c", HELM], input=asked, capture_output=True, text=True, check=True, timeout=120
    )
    found: Json = json.loads(done.stdout)
    return found


def rendered(**values: Any) -> list[Json]:
    """Every object of the chart."""
    found = helm(json.dumps(SEEDED | values))
    return [each for text in found["texts"] for each in yaml.safe_load_all(text) if each]


def everything() -> list[Json]:
    """The chart with all options: three pools, scaling, monitoring."""
    (pool,) = yaml.safe_load((CHART / "values.yaml").read_text())["pools"]
    scaling = {"enabled": True, "max": 4, "waitingTokens": 1000}
    pools = [
        pool | {"autoscaling": scaling, "nodeSelector": {"gpu": "yes"}},
        pool | {"name": "prefill", "role": "prefill", "flags": ["--tp-size=2"]},
        pool | {"name": "decode", "role": "decode", "tolerations": [{"operator": "Exists"}]},
    ]
    from_ = [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]
    return rendered(pools=pools, monitoring={"enabled": True}, routers={"from": from_})


# -- flags and endpoints of the code --------------------------------------------------------------------


@functools.cache
def options_of(name: str) -> set[str]:
    """The flags of one of our commands; for servers, SGLang's as well, read from its source."""
    flags = flags_of(COMMANDS[name])
    assert flags is not None
    found = set(flags.parser()._option_string_actions)
    if flags is KvConfig:
        spec = importlib.util.find_spec("sglang")
        assert spec is not None
        assert spec.origin is not None
        srt = Path(spec.origin).parent / "srt"
        for path in (srt / "server_args.py", *(srt / "arg_groups").rglob("*.py")):
            source = path.read_text()
            found |= set(re.findall(r'"(--[a-z][a-z0-9-]+)"', source))
            fields = re.findall(r"^    ([a-z]\w+)\s*:", source, re.M)
            found |= {"--" + field.replace("_", "-") for field in fields}
        found.add(KEY_FILE_FLAG)
    return found


def unknown_flags(words: list[str]) -> list[str]:
    """The flags of a command line of ours, program excluded, that the command does not have."""
    given = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
    return sorted(given - options_of(words[0]))


def answers(path: str) -> bool:
    """Whether router or server answer a path: `Route` and the like name it."""
    places = [*(ROOT / "sglang_ext" / "router" / "endpoints").glob("*.py")]
    return any(f'"{path}"' in place.read_text() for place in places)


# -- objects --------------------------------------------------------------------------------------------


def pods(objects: list[Json]) -> Iterator[tuple[str, Json, Json]]:
    """Each object with pods: its name, its pods' template and itself."""
    for each in objects:
        if "template" in each.get("spec", {}):
            yield f"{each['kind']} {each['metadata']['name']}", each["spec"]["template"], each


def selected_by(selector: Json, objects: list[Json]) -> list[str]:
    """The objects whose pods have these labels."""
    return [
        name
        for name, template, _ in pods(objects)
        if selector.items() <= template["metadata"]["labels"].items()
    ]


def wrong_in(objects: list[Json]) -> list[str]:
    """The parts of a rendered chart that do not fit each other or the code."""
    found: list[str] = []
    secrets = {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "Secret"}
    services = {each["metadata"]["name"] for each in objects if each["kind"] == "Service"}
    for name, template, owner in pods(objects):
        found += [f"{name}: {problem}" for problem in _wrong_in_pod(template, secrets)]
        if not owner["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items():
            found.append(f"{name}: selects other pods than its own")
        if owner["kind"] == "StatefulSet" and owner["spec"]["serviceName"] not in services:
            found.append(f"{name}: no service {owner['spec']['serviceName']}")
        for container in template["spec"]["containers"]:
            for host in re.findall(r"(?:redis|http)://([a-z0-9-]+):", str(container)):
                if host not in services:
                    found.append(f"{name}: no service {host}")
    for each in objects:
        found += [
            f"{each['kind']} {each['metadata']['name']}: {p}" for p in _wrong_in_selection(each, objects)
        ]
    return found


def _wrong_in_pod(template: Json, secrets: dict[str, Json]) -> Iterator[str]:
    spec = template["spec"]
    volumes = {volume["name"] for volume in spec["volumes"]}
    keys: set[str] = set()
    for volume in spec["volumes"]:
        if "secret" in volume:
            there = set(secrets.get(volume["secret"]["secretName"], ()))
            keys |= {item["path"] for item in volume["secret"]["items"] if item["key"] in there}
            if volume["secret"]["defaultMode"] != 0o440 or not spec["securityContext"].get("fsGroup"):
                yield "keys are not as our key files have to be (0440, of the pod's fsGroup)"
    for container in spec["containers"]:
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        if missing := mounted - volumes - {"kv"}:
            yield f"mounts {missing}, which is no volume"
        ports = {port["name"] for port in container["ports"]}
        for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
            how = container.get(probe, {})
            action = how.get("httpGet") or how.get("tcpSocket")
            if action and action["port"] not in ports:
                yield f"{probe} at port {action['port']}, which it does not have"
            if action and "path" in action and not answers(action["path"]):
                yield f"{probe} asks {action['path']}, which no endpoint answers"
        used = set(re.findall(r"/keys/([a-z.]+)", str(container)))
        if used - keys:
            yield f"no key {', '.join(sorted(used - keys))}"
        if keys - used:
            yield f"has {', '.join(sorted(keys - used))}, which it does not use"
        if unknown := unknown_flags(container.get("args", ["router"])):
            yield f"{container['args'][0]} has no flags {unknown}"
        stop = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        if "sglang-ext" in str(stop):
            words = shlex.split(stop[-1])[2:]
            if unknown := unknown_flags(words):
                yield f"{words[0]} has no flags {unknown}"
            deadline = int(words[words.index("--deadline-secs") + 1])
            if deadline >= spec["terminationGracePeriodSeconds"]:
                yield "is killed while it drains"


def _wrong_in_selection(each: Json, objects: list[Json]) -> Iterator[str]:
    spec = each.get("spec", {})
    kind = each["kind"]
    if kind == "Service" and not selected_by(spec["selector"], objects):
        yield "selects no pods"
    if kind == "PodDisruptionBudget" and len(selected_by(spec["selector"]["matchLabels"], objects)) != 1:
        yield "does not select the pods of one owner"
    if kind == "NetworkPolicy" and not selected_by(spec["podSelector"]["matchLabels"], objects):
        yield "selects no pods"
    if kind == "HorizontalPodAutoscaler":
        target = spec["scaleTargetRef"]
        named = f"{target['kind']} {target['name']}"
        owners = {name: owner for name, _, owner in pods(objects)}
        if "replicas" in owners.get(named, {"spec": {"replicas": 0}})["spec"]:
            yield f"scales {named}, which is not there or has a number of its own"
        for metric in spec["metrics"]:
            name = metric["object"]["metric"]["name"].removeprefix("sglang_ext_router_")
            sources = [path.read_text() for path in (ROOT / "sglang_ext" / "router").rglob("*.py")]
            if not any(f'metrics.gauge("{name}"' in source for source in sources):
                yield f"no metric {name}"
    if kind == "ServiceMonitor":
        labels = spec["selector"]["matchLabels"].items()
        if not any(o["kind"] == "Service" and labels <= o["metadata"]["labels"].items() for o in objects):
            yield "selects no service"


@needs_helm
def test_the_chart_is_valid_for_kubernetes() -> None:
    import kubernetes_validate

    for each in everything():
        if each["kind"] != "ServiceMonitor":  # the operator's own, in no schema of Kubernetes
            kubernetes_validate.validate(each, KUBERNETES, strict=True)


@needs_helm
def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    report = helm(json.dumps(SEEDED))["lint"]
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@needs_helm
def test_the_chart_fits_itself_and_the_code() -> None:
    assert wrong_in(rendered()) == []
    objects = everything()
    assert wrong_in(objects) == []
    kinds = {each["kind"] for each in objects}
    assert kinds >= {
        "StatefulSet", "Deployment", "Service", "Secret", "PodDisruptionBudget", "HorizontalPodAutoscaler",
        "NetworkPolicy", "ServiceMonitor",
    }  # fmt: skip
    roles = {
        word.partition("=")[2]
        for _, template, _ in pods(objects)
        for word in template["spec"]["containers"][0].get("args", ())
        if word.startswith("--disaggregation-mode")
    }
    assert roles == {"prefill", "decode"}


def change(objects: list[Json], kind: str, path: str, value: Any) -> None:
    """Set something of the first object of a kind; ``~`` in a path is a slash in a name."""
    at: Any = next(each for each in objects if each["kind"] == kind)
    *way, last = [int(word) if word.isdecimal() else word.replace("~", "/") for word in path.split("/")]
    for word in way:
        at = at[word]
    at[last] = value


CONTAINER = "spec/template/spec/containers/0"


@needs_helm
@pytest.mark.parametrize(
    ("kind", "path", "value", "said"),
    [
        ("StatefulSet", f"{CONTAINER}/args/1", "--model-pth=/m", "has no flags ['--model-pth']"),
        ("StatefulSet", f"{CONTAINER}/args/1", "--kv-diskpath=/m", "has no flags ['--kv-diskpath']"),
        ("StatefulSet", f"{CONTAINER}/readinessProbe/httpGet/path", "/healthy", "no endpoint answers"),
        ("StatefulSet", f"{CONTAINER}/readinessProbe/httpGet/port", "web", "does not have"),
        ("StatefulSet", f"{CONTAINER}/volumeMounts/2/name", "weights", "no volume"),
        ("StatefulSet", "spec/template/spec/terminationGracePeriodSeconds", 30, "killed while it drains"),
        ("StatefulSet", "spec/template/spec/volumes/0/secret/defaultMode", 0o444, "key files"),
        ("StatefulSet", "spec/serviceName", "nobody", "no service nobody"),
        ("StatefulSet", "spec/selector/matchLabels/sglang-ext~pool", "other", "other pods"),
        ("Secret", "data", {}, "no key"),
        (
            "Deployment",
            "spec/template/spec/volumes/0/secret/items",
            [{"key": key, "path": key} for key in ("cluster.key", "redis.password")],
            "has cluster.key, which it does not use",
        ),
        ("Service", "spec/selector", {"a": "b"}, "selects no pods"),
        ("PodDisruptionBudget", "spec/selector/matchLabels", {}, "one owner"),
        ("NetworkPolicy", "spec/podSelector/matchLabels", {"a": "b"}, "selects no pods"),
        ("HorizontalPodAutoscaler", "spec/scaleTargetRef/name", "nobody", "is not there"),
        (
            "HorizontalPodAutoscaler",
            "spec/metrics/0/object/metric/name",
            "sglang_ext_router_lines",
            "no metric",
        ),
        ("ServiceMonitor", "spec/selector/matchLabels", {"a": "b"}, "selects no service"),
    ],
)
def test_a_chart_that_does_not_fit_is_seen(kind: str, path: str, value: Any, said: str) -> None:
    """The twins."""
    objects = copy.deepcopy(everything())
    change(objects, kind, path, value)
    assert any(said in problem for problem in wrong_in(objects)), wrong_in(objects)


@needs_helm
def test_pools_that_cannot_serve_are_refused() -> None:
    (pool,) = yaml.safe_load((CHART / "values.yaml").read_text())["pools"]
    for wrong, said in (("prefill", "in pairs"), ("both", "there are colocated")):
        assert said in helm(json.dumps(SEEDED | {"pools": [pool | {"role": wrong}]}))["error"]


@needs_helm
def test_keys_are_the_same_at_each_render_and_none_are_drawn() -> None:
    """Without a cluster, as with GitOps, where Helm cannot look up keys that were made before."""

    def keys(**values: Any) -> Json:
        (secret,) = (each for each in rendered(**values) if each["kind"] == "Secret")
        data: Json = secret["data"]
        return data

    seed = "f" * 32
    first, second = keys(keys={"seed": seed}), keys(keys={"seed": seed}, routers={"replicas": 3})
    assert first == second
    assert len(set(first.values())) == len(first) == 4
    assert all(len(base64.b64decode(value)) == 64 for value in first.values())
    assert not set(first.values()) & set(keys(keys={"seed": "e" * 32}).values())
    assert "keys.existingSecret" in helm(json.dumps({"keys": {"seed": ""}}))["error"]
    assert "32 random characters" in helm(json.dumps({"keys": {"seed": "short"}}))["error"]
    assert not [each for each in rendered(keys={"existingSecret": "mine"}) if each["kind"] == "Secret"]


def test_the_chart_has_the_version_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)


# -- systemd, SLURM -------------------------------------------------------------------------------------


def commands_in(text: str) -> Iterator[list[str]]:
    """Command lines of `sglang-ext` in a unit or a script, without the program."""
    for line in text.replace("\\\n", " ").splitlines():
        if not line.lstrip().startswith("#") and (
            found := re.search(r"\bsglang-ext (?=[a-z]+ --)(.*)", line)
        ):
            yield [word for word in re.split(r"[\s'\"]+", found[1]) if word]


SCRIPTS = sorted([*(DEPLOY / "systemd").iterdir(), *(DEPLOY / "slurm").iterdir()])


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_units_and_scripts_name_flags_that_there_are(path: Path) -> None:
    commands = [*commands_in(path.read_text(encoding="utf-8"))]
    assert commands
    assert [unknown_flags(words) for words in commands] == [[]] * len(commands)
    wrong = path.read_text(encoding="utf-8").replace("--cluster-key-file", "--cluster-keyfile")
    assert any(unknown_flags(words) for words in commands_in(wrong)), "the twin"


def test_the_slurm_script_is_bash() -> None:
    for path in (DEPLOY / "slurm").iterdir():
        subprocess.run(["bash", "-n", str(path)], check=True)
