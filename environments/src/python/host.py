"""Runs one environment class for Rollcall. Standard library only; Python 3.9 or later.

Three processes, so that nothing is left behind and no episode sees another one's state:

- the guardian, which runs none of the user's code. It ends everything below it when its standard input
  is closed (by the program, or by the system when the program is gone);
- the worker, which imports the user's module once and then forks a player for each episode;
- the player, which makes a fresh instance, plays one episode and ends. Every player starts from the
  state that the worker had right after the import.

Requests and replies are lines of JSON on the pipes that were standard input and output; what the user's
code reads and prints goes to /dev/null and standard error. One request at a time, each with an id that
its reply repeats. A line {"ended": how} says that the player is gone: the reply to a close, a fault else.
"""

import sys

# The module's folder comes first, but only once this file has what it needs.
sys.path[:] = [entry for entry in sys.path if entry]

import enum
import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import random
import re
import resource
import select
import signal
import time
import traceback
import types
import typing

MOST_CHARS = 65537  # one more than any limit, so that the program sees that there was more
MOST_LINE = 1 << 22
RESERVED = ("reset", "get_reward", "close")


class Fault(Exception):
    """The environment cannot go on; the program voids the episode."""


# ---- The guardian ----------------------------------------------------------------------------------


def prctl(option, value):
    """Linux only, and a second line of defence: elsewhere, and without ctypes, nothing happens."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except Exception:
        pass


def descendants(root):
    """Every process below `root`, from /proc; none where there is no /proc."""
    children = {}
    try:
        entries = [entry for entry in os.listdir("/proc") if entry.isdigit()]
    except OSError:
        return []
    for entry in entries:
        try:
            with open("/proc/" + entry + "/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        children.setdefault(parent, []).append(int(entry))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found.extend(below)
        queue.extend(below)
    return found


def reap():
    """Takes the ended children; true when there are no others."""
    ended = []
    try:
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return ended, False
            ended.append(pid)
    except ChildProcessError:
        return ended, True


def guard(worker):
    poller = select.poll()
    poller.register(0, 0)  # hang-up only
    parent = os.getppid()
    while True:
        hung_up = poller.poll(1000)
        ended, _ = reap()
        if hung_up or worker in ended or os.getppid() != parent:
            break
    # Again and again: a process may fork while it is looked for.
    for _ in range(200):
        try:
            os.killpg(worker, signal.SIGKILL)
        except OSError:
            pass
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        if reap()[1]:
            break
        time.sleep(0.002)
    os._exit(0)


# ---- Lines -----------------------------------------------------------------------------------------


class Lines:
    def __init__(self, read, write):
        self.read, self.write, self.rest = read, write, b""

    def receive(self):
        """The next request; None when the program hung up. Never reads beyond one line's end for long:
        the program sends nothing before it has its reply."""
        while b"\n" not in self.rest:
            chunk = os.read(self.read, 1 << 16)
            if not chunk:
                return None
            self.rest += chunk
        line, _, self.rest = self.rest.partition(b"\n")
        return json.loads(line)

    def send(self, message):
        data = json.dumps(message, allow_nan=False).encode("ascii") + b"\n"
        if len(data) > MOST_LINE:
            data = json.dumps({"id": message.get("id"), "fault": "its reply is too long"}).encode() + b"\n"
        while data:
            data = data[os.write(self.write, data) :]


def text_of(value):
    """The text that the policy is shown: a str as it is, content blocks joined, else str(value)."""
    if isinstance(value, (list, tuple)) and value and all(
        isinstance(block, dict) and "type" in block for block in value
    ):
        parts = []
        for block in value:
            if block["type"] != "text":
                raise Fault("it returned a content block of type %.40r: only text is possible" % (block["type"],))
            parts.append(str(block.get("text", "")))
        value = "".join(parts)
    text = value if type(value) is str else str(value)
    # Pairs of surrogates are one character; lone ones cannot be written.
    if re.search("[\ud800-\udfff]", text):
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text[:MOST_CHARS]


def message_of(error):
    try:
        return text_of(str(error))
    except Exception:
        return type(error).__name__


def short(error):
    last = traceback.extract_tb(error.__traceback__)
    where = " at %s:%s" % (os.path.basename(last[-1].filename), last[-1].lineno) if last else ""
    return "%s: %s%s" % (type(error).__name__, message_of(error)[:300], where)


# ---- Tool schemas, as transformers.utils.get_json_schema makes them ---------------------------------

SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
SIMPLE = {**SCALARS, list: "array", tuple: "array", dict: "object"}
UNIONS = (typing.Union, getattr(types, "UnionType", typing.Union))
# Which part of a docstring is what: by the same expressions as in transformers (Apache-2.0).
DESCRIPTION = re.compile(r"^(.*?)[\n\s]*(Args:|Returns:|Raises:|\Z)", re.DOTALL)
ARGUMENTS = re.compile(r"\n\s*Args:\n(.*?)[\n\s]*(Returns:|Raises:|\Z)", re.DOTALL)
ARGUMENT = re.compile(
    r"(?:^|\n)([ \t]*)(\w+)(?:[ \t]*\([^()\n]*\))?:\s*(.*?)\s*"
    r"(?=\n(?!\1[ \t])[ \t]*\w+(?:[ \t]*\([^()\n]*\))?:|\Z)",
    re.DOTALL,
)
RETURNS = re.compile(r"\n\s*Returns:\n\s*(.*?)[\n\s]*(Raises:|\Z)", re.DOTALL)
CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def values_schema(values):
    if not values or any(type(value) not in SCALARS for value in values):
        raise Fault("choices %.80r cannot be described: use numbers, texts, booleans" % (values,))
    kinds = list(dict.fromkeys(SCALARS[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def hint_schema(hint):
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return values_schema([member.value for member in hint])
        if hint is typing.Any:
            return {}
        if isinstance(hint, type) and hint in SIMPLE:
            return {"type": SIMPLE[hint]}
    elif origin in UNIONS:
        parts = [hint_schema(part) for part in inner if part is not type(None)]
        if len(parts) == 1:
            schema = parts[0]
        elif all(part.keys() == {"type"} and isinstance(part["type"], str) for part in parts):
            kinds = sorted({part["type"] for part in parts})
            schema = {"type": kinds[0] if len(kinds) == 1 else kinds}
        else:
            schema = {"anyOf": parts}
        if type(None) in inner:
            schema["nullable"] = True
        return schema
    elif origin is typing.Literal:
        return values_schema(list(inner))
    elif origin is list:
        return {"type": "array", "items": hint_schema(inner[0])} if inner else {"type": "array"}
    elif origin is tuple and Ellipsis not in inner and len(inner) != 1:
        parts = [hint_schema(part) for part in inner]
        return {"type": "array", "prefixItems": parts} if parts else {"type": "array"}
    elif origin is dict:
        schema = {"type": "object"}
        if len(inner) == 2:
            schema["additionalProperties"] = hint_schema(inner[1])
        return schema
    raise Fault("the type hint %.80r cannot be described: use a simpler one" % (hint,))


def tool_schema(name, function, static):
    doc = inspect.getdoc(function)
    if not doc:
        raise Fault("tool %s has no docstring: say what it does" % name)
    doc = doc.strip()
    match = DESCRIPTION.search(doc)
    description = match.group(1).strip() if match else ""
    match = ARGUMENTS.search(doc)
    listed = match.group(1) if match else ""
    listed = "\n".join(line for line in listed.split("\n") if line.strip())
    described = {
        key: re.sub(r"\s*\n+\s*", " ", text.strip()) for _, key, text in ARGUMENT.findall(listed)
    }
    match = RETURNS.search(doc)
    returned = match.group(1).strip() if match else None

    parameters = list(inspect.signature(function).parameters.values())[0 if static else 1 :]
    hints = typing.get_type_hints(function)
    properties, required = {}, []
    for parameter in parameters:
        if parameter.annotation is inspect.Parameter.empty:
            raise Fault("argument %s of tool %s has no type hint: write one" % (parameter.name, name))
        if parameter.name not in described:
            raise Fault("argument %s of tool %s is not described: list it under Args:" % (parameter.name, name))
        schema = hint_schema(hints[parameter.name])
        text = described[parameter.name]
        choices = CHOICES.search(text)
        if choices:
            listed = json.loads(choices.group(1))
            schema["enum"] = [it.strip() if isinstance(it, str) else it for it in listed]
            text = text[: choices.start()].strip()
        schema["description"] = text
        properties[parameter.name] = schema
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    tool = {"name": name, "description": description, "parameters": schema}
    if "return" in hints:
        try:
            tool["return"] = hint_schema(hints["return"])
        except Fault:  # the policy never writes it
            return tool
        if returned is not None:
            tool["return"]["description"] = returned
    return tool


def tools_of(kind, reward):
    tools = []
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        if name in RESERVED or name == reward or name.startswith("_"):
            continue
        static = isinstance(inspect.getattr_static(kind, name), staticmethod)
        try:
            tools.append(tool_schema(name, function, static))
        except Fault:
            raise
        except Exception as error:
            raise Fault("tool %s cannot be described: %s" % (name, short(error)))
    return tools


# ---- The player ------------------------------------------------------------------------------------


class Player:
    def __init__(self, kind, tools, reward):
        self.kind, self.tools, self.reward, self.instance = kind, tools, reward, None

    def reset(self, request):
        seed = request["seed"]
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        self.instance = self.kind()
        accepted = inspect.signature(self.instance.reset).parameters.values()
        row = request["row"]
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted):
            names = {parameter.name for parameter in accepted}
            row = {key: value for key, value in row.items() if key in names}
        said = finished(self.instance.reset(**row))
        return {"text": None if said is None else text_of(said)}

    def call(self, request):
        if request["tool"] not in self.tools:
            raise Fault("it has no tool %.60r" % (request["tool"],))
        try:
            said = finished(getattr(self.instance, request["tool"])(**request["arguments"]))
            answer = {"text": text_of(said)}
        except (Fault, MemoryError):
            raise
        except Exception as error:
            answer = {"raised": message_of(error)}
        answer["done"] = getattr(self.instance, "done", False) is True
        return answer

    def score(self, request):
        if self.reward:
            reward = getattr(self.instance, self.reward)
            reward = finished(reward()) if callable(reward) else reward
        elif callable(getattr(self.instance, "get_reward", None)):
            reward = finished(self.instance.get_reward())
        elif hasattr(self.instance, "reward") and not callable(self.instance.reward):
            reward = self.instance.reward
        else:
            raise Fault("it has neither get_reward() nor a reward")
        reward = float(reward)
        if not math.isfinite(reward):
            raise Fault("its reward is %r" % reward)
        return {"reward": reward}


def finished(value):
    if not inspect.iscoroutine(value):
        return value
    import asyncio  # slow to import, and seldom needed

    return asyncio.run(value)


def play(lines, player, request):
    """Plays one episode, from its reset on. Ends the process."""
    operations = {"reset": player.reset, "call": player.call, "score": player.score}
    while request is not None and request["op"] != "close":
        try:
            answer = operations[request["op"]](request)
        except Fault as fault:
            answer = {"fault": str(fault)}
        except BaseException as error:  # SystemExit, KeyboardInterrupt and MemoryError among them
            answer = {"fault": short(error)}
        answer["id"] = request["id"]
        lines.send(answer)
        request = lines.receive()
    flush()
    os._exit(0)


def flush():
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass


# ---- The worker ------------------------------------------------------------------------------------


def load(request):
    """The class, imported from the file that the program hashed."""
    if request["memory_mib"]:
        limit = request["memory_mib"] << 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path.insert(0, request["folder"])
    if importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy")  # so that every player can seed it
    module = importlib.import_module(request["module"])
    file = getattr(module, "__file__", None)
    if file is None or os.path.realpath(file) != os.path.realpath(request["file"]):
        raise Fault("module %s was imported from %s: give yours another name" % (request["module"], file))
    with open(file, "rb") as source:
        if hashlib.sha256(source.read()).hexdigest() != request["sha256"]:
            raise Fault("%s has changed since it was read: start again" % os.path.basename(file))
    kind = getattr(module, request["class"], None)
    if not inspect.isclass(kind):
        raise Fault("module %s has no class %s" % (request["module"], request["class"]))
    if not callable(getattr(kind, "reset", None)):
        raise Fault("class %s has no reset method" % request["class"])
    return kind


def how(status):
    if os.WIFSIGNALED(status):
        return "killed by signal %d" % os.WTERMSIG(status)
    return "exit status %d" % os.WEXITSTATUS(status) if os.WEXITSTATUS(status) else "exit status 0"


def work(lines):
    request = lines.receive()
    if request is None:
        return
    try:
        kind = load(request)
        tools = tools_of(kind, request["reward"])
    except Fault as fault:
        lines.send({"id": request["id"], "fault": str(fault)})
        return
    except BaseException as error:
        lines.send({"id": request["id"], "fault": "import: " + short(error)})
        return
    lines.send({"id": request["id"], "tools": tools, "python": "%d.%d.%d" % sys.version_info[:3]})
    reward = request["reward"]
    names = {tool["name"] for tool in tools}
    while True:
        request = lines.receive()
        if request is None:
            return
        flush()
        player = os.fork()
        if player == 0:
            prctl(1, signal.SIGKILL)  # ends with the worker
            os.setpgid(0, 0)
            play(lines, Player(kind, names, reward), request)
        _, status = os.waitpid(player, 0)
        try:
            os.killpg(player, signal.SIGKILL)  # what it left running
        except OSError:
            pass
        lines.send({"ended": how(status)})


def main():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl(36, 1)  # orphans below come to the guardian
    worker = os.fork()
    if worker:
        os.dup2(2, 1)
        os.setpgid(worker, worker)
        guard(worker)
    prctl(1, signal.SIGKILL)  # ends with the guardian
    try:
        os.setpgid(0, 0)
    except OSError:
        pass
    read, write = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        work(Lines(read, write))
    except BrokenPipeError:
        pass
    flush()
    os._exit(0)


main()
