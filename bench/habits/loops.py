# ruff: noqa: E501 (lines of scripts)
"""Where batches come from, and the loops over them, in generated scripts."""

from __future__ import annotations

from typing import NamedTuple


class Source(NamedTuple):
    """An iterable of inputs `x`, in one process unless it has `workers`, and what it needs before it."""

    batches: str
    before: str = ""
    workers: bool = False
    loader: bool = False


class Text(NamedTuple):
    """Lines around a `<body>`, or around a `<loop>`, and what they need before them."""

    lines: str
    before: str = ""


_DATA = "DATA = torch.cat([<sample> for _ in range(<steps>)])"
_MAPPED = """
class Samples(Dataset):
    def __init__(self):
        self.data = torch.cat([<sample> for _ in range(<steps>)])

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return {"x": self.data[index], "name": str(index)}
"""
_STREAM = """
class Stream(IterableDataset):
    def __iter__(self):
        for _ in range(<steps>):
            yield from <sample>
"""
_MAKES = """
def makes():
    for _ in range(<steps>):
        yield <sample>
"""
_PREFETCHES = """
def prefetched(batches, ahead=2):
    waiting = queue.Queue(ahead)

    def fill():
        for batch in batches:
            waiting.put(batch)
        waiting.put(None)

    threading.Thread(target=fill, daemon=True).start()
    while (batch := waiting.get()) is not None:
        yield batch
"""
_BUFFERED = """
class Buffered:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        self.iterator = iter(self.batches)
        return self

    def __next__(self):
        return next(self.iterator)

    def __len__(self):
        return <steps>
"""
_COLLATE = """
def collate(samples):
    return torch.stack([one["x"] for one in samples])
"""

SOURCES: dict[str, Source] = {
    "made in the loop": Source("(<sample> for _ in range(<steps>))"),
    "one batch again": Source("[<sample>] * <steps>"),
    "a list": Source("[<sample> for _ in range(<steps>)]"),
    "a generator": Source("makes()", _MAKES),
    "an iterator class": Source("Buffered(makes())", _MAKES + _BUFFERED),
    "a queue and a thread": Source("prefetched([<sample> for _ in range(<steps>)])", _PREFETCHES),
    "a cycle": Source("itertools.islice(itertools.cycle([<sample>, <sample>]), <steps>)"),
    "a loader without a name": Source(
        "(x for (x,) in DataLoader(TensorDataset(DATA), batch_size=<batch>))", _DATA, loader=True
    ),
    "a shuffling loader": Source(
        "LOADER",
        _MAPPED
        + _COLLATE
        + "LOADER = DataLoader(Samples(), batch_size=<batch>, shuffle=True, collate_fn=collate, drop_last=True)",
        loader=True,
    ),
    "a loader with a sampler": Source(
        "(one['x'] for one in LOADER)",
        _MAPPED + "DATA = Samples()\n"
        "LOADER = DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), <batch>, False))",
        loader=True,
    ),
    "a loader of a stream": Source(
        "DataLoader(Stream(), batch_size=<batch>)", _STREAM, loader=True
    ),
    "a loader's worker": Source(
        "(one['x'] for one in DataLoader(Samples(), batch_size=<batch>, num_workers=1))",
        _MAPPED,
        workers=True,
        loader=True,
    ),
    "a loader of batches": Source(
        "DataLoader(DATA.split(<batch>), batch_size=None)", _DATA, loader=True
    ),
    "two loaders": Source(
        "(x for (x,), _ in zip(DataLoader(TensorDataset(DATA), batch_size=<batch>), itertools.count()))",
        _DATA,
        loader=True,
    ),
    "epochs in a generator": Source(
        "(x for _ in range(2) for (x,) in DataLoader(TensorDataset(DATA[:len(DATA) // 2]), batch_size=<batch>))",
        _DATA,
        loader=True,
    ),
}
LOOPS: dict[str, Text] = {
    "for": Text("for step, x in enumerate(<batches>):\n    <body>"),
    "while": Text(
        "iterator, step = iter(<batches>), 0\nwhile True:\n    x = next(iterator, None)\n"
        "    if x is None:\n        break\n    <body>\n    step += 1"
    ),
    "except StopIteration": Text(
        "iterator, step = iter(<batches>), 0\nwhile True:\n    try:\n        x = next(iterator)\n"
        "    except StopIteration:\n        break\n    <body>\n    step += 1"
    ),
    "recursion": Text(
        "def go(step, iterator):\n    x = next(iterator, None)\n    if x is None:\n        return\n    <body>\n"
        "    go(step + 1, iterator)\n\ngo(0, iter(<batches>))"
    ),
    "a function a step": Text(
        "def train_step(step, x):\n    <body>\n    return loss\n\n"
        "for step, x in enumerate(<batches>):\n    loss = train_step(step, x)"
    ),
    "a class with fit": Text(
        "class Trainer:\n    def fit(self, batches):\n        for step, x in enumerate(batches):\n"
        "            self.training_step(step, x)\n\n    def training_step(self, step, x):\n        <body>\n\n"
        "Trainer().fit(<batches>)"
    ),
    "a generator of losses": Text(
        "def steps(batches):\n    for step, x in enumerate(batches):\n        <body>\n        yield loss\n\n"
        "for loss in steps(<batches>):\n    del loss"
    ),
    "a comprehension": Text(
        "def train_step(step, x):\n    <body>\n    return loss.item()\n\n"
        "losses = [train_step(step, x) for step, x in enumerate(<batches>)]"
    ),
    "map": Text(
        "def train_step(given):\n    step, x = given\n    <body>\n\n"
        "collections.deque(map(train_step, enumerate(<batches>)), maxlen=0)"
    ),
    "for and else": Text(
        "for step, x in enumerate(<batches>):\n    <body>\nelse:\n    print('all batches')"
    ),
    "a coroutine": Text(
        "async def train():\n    for step, x in enumerate(<batches>):\n        <body>\n"
        "        await asyncio.sleep(0)\n\nasyncio.run(train())"
    ),
    "retries": Text(
        "for step, x in enumerate(<batches>):\n    for attempt in range(2):\n        try:\n            <body>\n"
        "            break\n        except ZeroDivisionError:\n            continue"
    ),
}
"""A `<body>` trains one batch `x`, number `step`, and leaves `loss`."""
AROUND: dict[str, Text] = {
    "nothing": Text("<loop>"),
    "a disabled profiler": Text(
        "with torch.autograd.profiler.profile(enabled=False) as prof:\n    <loop>"
    ),
    "a profiler": Text(
        "with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:\n    <loop>\n"
        "print(len(prof.key_averages()) > 0)"
    ),
    "record_function": Text("with torch.profiler.record_function('train'):\n    <loop>"),
    "a timer": Text(
        "begin = time.perf_counter()\n<loop>\nprint('seconds', time.perf_counter() - begin, file=sys.stderr)"
    ),
    "try and finally": Text("try:\n    <loop>\nfinally:\n    print('finally')"),
    "try and except": Text(
        "try:\n    <loop>\nexcept Exception as error:\n    print('failed', type(error).__name__)\n    raise"
    ),
    "an exit stack": Text(
        "with contextlib.ExitStack() as stack:\n    stack.callback(print, 'closed')\n"
        "    stack.enter_context(torch.set_grad_enabled(True))\n    <loop>"
    ),
    "detect_anomaly": Text("with torch.autograd.detect_anomaly(check_nan=False):\n    <loop>"),
    "redirected output": Text(
        "said = io.StringIO()\nwith contextlib.redirect_stdout(said):\n    <loop>\nprint(said.getvalue())"
    ),
    "caught warnings": Text(
        "with warnings.catch_warnings():\n    warnings.simplefilter('error')\n    <loop>"
    ),
    "a thread": Text(
        "def work():\n    <loop>\n\nthread = threading.Thread(target=work)\nthread.start()\nthread.join()"
    ),
    "a default device": Text("with torch.device('cpu'):\n    <loop>"),
    "saved tensor hooks": Text(
        "with torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one):\n    <loop>"
    ),
    "a function mode": Text(
        "with Counted() as counted:\n    <loop>\nprint(counted.calls > 0)",
        "class Counted(torch.overrides.TorchFunctionMode):\n    calls = 0\n\n"
        "    def __torch_function__(self, func, types, args=(), kwargs=None):\n"
        "        self.calls += 1\n        return func(*args, **(kwargs or {}))\n",
    ),
    "fork_rng": Text("with torch.random.fork_rng():\n    <loop>"),
    "an alarm": Text(
        "signal.signal(signal.SIGALRM, lambda *_: print('too long'))\nsignal.alarm(600)\n<loop>\nsignal.alarm(0)"
    ),
    "a bar": Text(
        "enumerate = Bar\n<loop>",
        "import builtins\n\nclass Bar:\n    def __init__(self, batches):\n        self.batches = batches\n\n"
        "    def __iter__(self):\n        for number, one in builtins.enumerate(self.batches):\n"
        "            yield number, one\n            print(f'\\r{number}', end='', file=sys.stderr)\n",
    ),
}
