# ruff: noqa: E501 (lines of scripts)
"""Global settings, additions, ends and ways to start that people give to training scripts."""

from __future__ import annotations

from typing import NamedTuple


class Addition(NamedTuple):
    """Lines added to a script: at its top, before the loop, between backward and step, after, at the end.

    They find `net`, `opts`, `x`, `loss` and `step`. `dense`: they take no sparse gradients. `lone`: they need
    an optimizer.
    """

    top: str = ""
    setup: str = ""
    between: str = ""
    after: str = ""
    end: str = ""
    dense: bool = False
    lone: bool = False


class End(NamedTuple):
    """How a script ends: lines at its end or after step `LAST`, and code before. `code`: its exit code."""

    lines: str = ""
    after: str = ""
    before: str = ""
    code: int = 0


SETTINGS: dict[str, str] = {
    "default device": "torch.set_default_device('cpu')",
    "default dtype": "torch.set_default_dtype(torch.float64)",
    "default tensor type": "torch.set_default_tensor_type(torch.DoubleTensor)",
    "deterministic algorithms": "torch.use_deterministic_algorithms(True)",
    "deterministic, warned": "torch.use_deterministic_algorithms(True, warn_only=True)",
    "one thread": "torch.set_num_threads(1)",
    "interop threads": "torch.set_num_interop_threads(1)",
    "anomaly mode": "torch.autograd.set_detect_anomaly(True)",
    "gradients off and on": "torch.set_grad_enabled(False)\ntorch.set_grad_enabled(True)",
    "precision": "torch.set_float32_matmul_precision('medium')",
    "printing": "torch.set_printoptions(precision=8, sci_mode=False)",
    "denormals": "torch.set_flush_denormal(True)",
    "warnings are errors": "warnings.simplefilter('error')",
    "an excepthook": "sys.excepthook = lambda kind, error, trace: print('hook:', kind.__name__, file=sys.stderr)",
    "logging": "logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='%(message)s', force=True)\nlogging.info('begins')",
    "locale": "import locale\nlocale.setlocale(locale.LC_ALL, 'C')",
    "recursion": "sys.setrecursionlimit(5000)",
    "no garbage collection": "import gc\ngc.disable()\ngc.set_threshold(100000)",
    "every seed": "random.seed(1)\nnumpy.random.seed(1)\ntorch.manual_seed(1)\ntorch.use_deterministic_algorithms(False)",
    "environment": "os.environ['TOKENIZERS_PARALLELISM'] = 'false'\nos.environ.setdefault('WORLD_SIZE', '1')",
    "cudnn": "torch.backends.cudnn.benchmark = True\ntorch.backends.cuda.matmul.allow_tf32 = True",
    "stdout in lines": "sys.stdout.reconfigure(line_buffering=True)",
    "a wrapped stdout": "sys.stdout = io.TextIOWrapper(open(sys.stdout.fileno(), 'wb', 0, closefd=False), write_through=True)",
    "a tee": "class Tee:\n    def __init__(self, *files):\n        self.files = files\n\n    def write(self, text):\n"
    "        for file in self.files:\n            file.write(text)\n\n    def flush(self):\n        pass\n\n"
    "sys.stdout = Tee(sys.stdout, open('log.txt', 'w'))",
    "no stderr": "sys.stderr = open(os.devnull, 'w')",
    "another folder": "os.makedirs('runs', exist_ok=True)\nos.chdir('runs')",
    "a patched module": "_original = nn.Linear.forward\nnn.Linear.forward = lambda self, x: _original(self, x)",
    "a patched call": "_call = nn.Module.__call__\nnn.Module.__call__ = lambda self, *args, **kwargs: _call(self, *args, **kwargs)",
    "a patched optimizer": "_init = torch.optim.Optimizer.__init__\n\n"
    "def _patched(self, *args, **kwargs):\n    _init(self, *args, **kwargs)\n\ntorch.optim.Optimizer.__init__ = _patched",
    "global hooks": "torch.nn.modules.module.register_module_forward_hook(lambda m, args, out: None)\n"
    "torch.nn.modules.module.register_module_forward_pre_hook(lambda m, args: None)",
    "a trace function": "sys.setprofile(None)",
    "faulthandler": "import faulthandler\nfaulthandler.enable()",
    "jit off": "torch.jit.enable_onednn_fusion(False)",
    "start method": "import torch.multiprocessing as mp\nmp.set_start_method('fork', force=True)\nmp.set_sharing_strategy('file_system')",
    "future flags": "torch.__future__.set_overwrite_module_params_on_conversion(True)",
    "no new gradients of views": "torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)",
}
"""Lines below the imports. Several may be drawn."""

ADDITIONS: dict[str, Addition] = {
    "a schedule": Addition(
        setup="scheds = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 10) for o in opts]",
        after="for s in scheds:\n    s.step()",
    ),
    "one cycle": Addition(
        setup="scheds = [torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)) for o in opts]",
        after="for s in scheds:\n    s.step()\n    print(s.get_last_lr())",
    ),
    "a plateau": Addition(
        setup="scheds = [torch.optim.lr_scheduler.ReduceLROnPlateau(o) for o in opts]",
        after="for s in scheds:\n    s.step(loss.item())",
    ),
    "an average": Addition(
        setup="average = copy.deepcopy(net).requires_grad_(False)",
        after="with torch.no_grad():\n    for a, p in zip(average.parameters(), net.parameters()):\n"
        "        a.lerp_(p.detach(), 0.01)",
        end="print(f'{sum(p.double().sum().abs().item() for p in average.parameters()):.6f}')",
    ),
    "averaged by torch": Addition(
        setup="swa = torch.optim.swa_utils.AveragedModel(net)",
        after="swa.update_parameters(net)",
    ),
    "evaluation": Addition(
        after="if step % 3 == 2:\n    net.eval()\n    with torch.no_grad():\n        print('eval', f'{<loss>.item():.6f}')\n    net.train()",
    ),
    "evaluation by inference_mode": Addition(
        top="@torch.inference_mode()\ndef evaluate(net, x):\n    net.eval()\n    said = <loss>.item()\n    net.train()\n    return said\n",
        after="if step % 2:\n    print('eval', f'{evaluate(net, x):.6f}')",
    ),
    "evaluation before training": Addition(
        setup="net.eval()\nwith torch.no_grad():\n    x = <sample>\n    print('before', f'{<loss>.item():.6f}')\nnet.train()",
    ),
    "a long evaluation": Addition(
        after="if step == 4:\n    with torch.no_grad():\n        net.eval()\n        print('eval', [f'{<loss>.item():.5f}' for _ in range(5)])\n        net.train()",
    ),
    "saves": Addition(
        after="if step % 4 == 3:\n    torch.save({'net': net.state_dict(), 'opts': [o.state_dict() for o in opts], 'step': step}, 'last.pt')",
        end="print(sorted(torch.load('last.pt'))) if os.path.exists('last.pt') else None",
    ),
    "saves the whole": Addition(
        end="saved = io.BytesIO()\ntorch.save(net.state_dict(), saved)\nsaved.seek(0)\n"
        "print(net.load_state_dict(torch.load(saved)))",
    ),
    "loads in between": Addition(
        after="if step == 5:\n    net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()})\n"
        "    for o in opts:\n        o.load_state_dict(o.state_dict())",
    ),
    "resumes": Addition(
        setup="if os.path.exists('resume.pt'):\n    net.load_state_dict(torch.load('resume.pt'))\n    print('resumed')",
    ),
    "a copy": Addition(after="if step == 3:\n    best = copy.deepcopy(net)"),
    "forward hooks": Addition(
        setup="sizes = []\nfor b in net.blocks:\n    b.register_forward_hook(lambda m, args, out: sizes.append(type(out).__name__))",
        end="print(len(sizes))",
    ),
    "hooks that change": Addition(
        setup="net.head.register_forward_pre_hook(lambda m, args: (args[0] * 1.5,))\n"
        "net.head.register_forward_hook(lambda m, args, out: out * 0.5)",
    ),
    "backward hooks": Addition(
        setup="norms = []\nnet.head.register_full_backward_hook(lambda m, gi, go: norms.append(go[0].norm().item()))",
        end="print([f'{n:.5f}' for n in norms])",
    ),
    "hooks of parameters": Addition(
        setup="for p in net.head.parameters():\n    p.register_hook(lambda g: g * 0.9)",
    ),
    "hooks after gradients": Addition(
        setup="counted = []\nfor p in net.head.parameters():\n    p.register_post_accumulate_grad_hook(lambda p: counted.append(p.grad is not None))",
        end="print(len(counted), all(counted))",
    ),
    "hooks of optimizers": Addition(
        setup="stepped = []\nfor o in opts:\n    o.register_step_pre_hook(lambda o, a, k: stepped.append('pre'))\n"
        "    o.register_step_post_hook(lambda o, a, k: stepped.append('post'))",
        end="print(len(stepped))",
    ),
    "a retained gradient": Addition(
        setup="kept = []\nnet.head.register_forward_hook(lambda m, args, out: (out.retain_grad(), kept.append(out))[0] if out.requires_grad else None)",
        after="print(f'{kept[-1].grad.norm().item():.5f}') if kept and kept[-1].grad is not None else None\nkept.clear()",
    ),
    "frozen blocks": Addition(setup="net.blocks[0].requires_grad_(False)"),
    "frozen later": Addition(after="if step == 4:\n    net.blocks[0].requires_grad_(False)"),
    "a teacher": Addition(
        setup="teacher = copy.deepcopy(net).eval().requires_grad_(False)",
        after="with torch.no_grad():\n    print('teacher', f'{(lambda net: <loss>)(teacher).item():.5f}')",
    ),
    "another model": Addition(
        setup="critic = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))\ncritic_opt = torch.optim.SGD(critic.parameters(), lr=0.01)",
        after="critic_opt.zero_grad()\ncritic_loss = critic(torch.ones(16, 8)).mean()\ncritic_loss.backward()\ncritic_opt.step()\n"
        "print(f'{critic_loss.item():.5f}')",
    ),
    "gradients' norms": Addition(
        between="print('norm', f'{sum(p.grad.to_dense().norm().item() for p in net.parameters() if p.grad is not None):.4f}')",
    ),
    "noise on gradients": Addition(
        between="for p in net.parameters():\n    if p.grad is not None:\n        p.grad.mul_(0.99)",
    ),
    "weights printed": Addition(
        end="print(f'{sum(p.double().abs().sum().item() for p in net.parameters()):.6f}')",
    ),
    "losses kept": Addition(
        setup="kept_losses = []",
        after="kept_losses.append(loss.detach())",
        end="print(len(kept_losses))",
    ),
    "losses kept with graphs": Addition(
        setup="running = collections.deque(maxlen=2)",
        after="running.append(loss)",
        end="print(len(running))",
    ),
    "a total": Addition(
        setup="total = [0.0]",
        after="total[0] += float(loss.detach())",
        end="print(f'{total[0]:.6f}')",
    ),
    "seeds in the loop": Addition(after="torch.manual_seed(step)"),
    "numbers of numpy": Addition(
        after="print(f'{numpy.random.rand():.6f} {random.random():.6f}')",
        setup="numpy.random.seed(0)\nrandom.seed(0)",
    ),
    "collections of garbage": Addition(after="import gc\ngc.collect()"),
    "a subprocess": Addition(
        after="if step == 2:\n    print(subprocess.run(['echo', 'child'], capture_output=True, text=True).stdout.strip())"
    ),
    "a fork": Addition(
        after="if step == 2:\n    sys.stdout.flush()\n    pid = os.fork()\n    if pid == 0:\n        os._exit(7)\n    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
    ),
    "a pool of threads": Addition(
        after="if step == 1:\n    from concurrent.futures import ThreadPoolExecutor\n    with ThreadPoolExecutor(2) as pool:\n        print(list(pool.map(abs, [-1, -2])))",
    ),
    "a process of its own": Addition(
        top="def shout(queue):\n    queue.put('from a process')\n",
        end="import multiprocessing\ncontext = multiprocessing.get_context('fork')\nqueue_ = context.SimpleQueue()\n"
        "process = context.Process(target=shout, args=(queue_,))\nprocess.start()\nprint(queue_.get())\nprocess.join()",
    ),
    "tied weights": Addition(
        setup="net.tied = nn.Linear(1, 1, bias=False)\nnet.tied.weight = nn.Parameter(net.head.weight.detach()[:1, :1].clone())\nnet.again = net.tied"
    ),
    "no gradients in between": Addition(
        after="with torch.no_grad():\n    for p in net.parameters():\n        p.clamp_(-3, 3)"
    ),
    "summaries": Addition(
        setup="print(sum(p.numel() for p in net.parameters()), len(list(net.modules())))"
    ),
    "repr": Addition(setup="print(len(repr(net)) > 10)"),
    "apply": Addition(
        setup="net.apply(lambda m: m.bias.data.zero_() if isinstance(m, nn.Linear) and m.bias is not None and type(m.bias) is nn.Parameter else None)"
    ),
    "moves": Addition(setup="net = net.to('cpu').train()"),
    "a device's name": Addition(
        setup="device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\nprint(device.type in ('cpu', 'cuda'))"
    ),
    "warns": Addition(after="if step == 2:\n    warnings.warn('careful', UserWarning)"),
    "a file of lines": Addition(
        after="with open('losses.csv', 'a') as file:\n    file.write(f'{step},{loss.item():.5f}\\n')",
        end="print(open('losses.csv').read().count(chr(10)))",
    ),
    "autograd graph": Addition(between="print(type(loss.grad_fn).__name__)"),
    "a folder of its own": Addition(
        setup="os.mkdir('out')",
        after="with open(f'out/{step}.txt', 'w') as file:\n    file.write(str(step))",
        end="print(sorted(os.listdir('out')))",
    ),
    "a checkpoint to go on from": Addition(
        setup="if os.path.exists('last.pt'):\n    net.load_state_dict(torch.load('last.pt', weights_only=True))\n    print('goes on')",
        after="torch.save(net.state_dict(), 'new.pt')\nos.replace('new.pt', 'last.pt')",
    ),
    "a caught exception": Addition(
        after="try:\n    torch.ones(2) @ torch.ones(3)\nexcept RuntimeError:\n    pass"
    ),
    "functorch": Addition(
        after="if step == 2:\n    print(torch.func.grad(lambda y: y.square().sum())(torch.ones(2)).tolist())"
    ),
    "anomaly at one step": Addition(
        after="if step == 2:\n    with torch.autograd.detect_anomaly(False):\n        (torch.ones(1, requires_grad=True) * 2).backward()"
    ),
    "no optimizer state": Addition(
        after="if step == 4:\n    for o in opts:\n        o.state.clear()"
    ),
    "another rate": Addition(
        after="for o in opts:\n    for g in o.param_groups:\n        g['lr'] *= 0.9"
    ),
    "a script for export": Addition(
        end="print(type(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))).__name__)"
    ),
}
"""Several may be drawn."""

ENDS: dict[str, End] = {
    "falls off its end": End("print('done')"),
    "sys.exit()": End("print('done')\nsys.exit()"),
    "sys.exit(0)": End("sys.exit(0)"),
    "sys.exit(3)": End("sys.exit(3)", code=3),
    "sys.exit with a text": End("sys.exit('goodbye')", code=1),
    "os._exit(0)": End("print('done', flush=True)\nos._exit(0)"),
    "os._exit(5)": End("sys.stdout.flush()\nos._exit(5)", code=5),
    "raises": End("raise ValueError('at the end')", code=1),
    "an interrupt": End("raise KeyboardInterrupt", code=130),
    "exits in the loop": End(after="if step == LAST:\n    print('early')\n    sys.exit(0)"),
    "quits in the loop": End(
        after="if step == LAST:\n    print('early', flush=True)\n    os._exit(0)"
    ),
    "exits in the loop with a code": End(after="if step == LAST:\n    sys.exit(4)", code=4),
    "raises in the loop": End(
        after="if step == LAST:\n    raise RuntimeError('in the loop')", code=1
    ),
    "atexit": End("print('done')", before="atexit.register(lambda: print('at exit'))"),
    "a closed stdout": End(
        "print('done')\nsys.stdout.flush()\nsys.stdout.close()\nsys.stdout = open(os.devnull, 'w')"
    ),
    "a handler of SIGTERM": End(
        "os.kill(os.getpid(), signal.SIGTERM)\nprint('not reached?')",
        before="signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))",
        code=15,
    ),
    "an ignored signal": End(
        "os.kill(os.getpid(), signal.SIGUSR1)\nprint('done')",
        before="signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
    ),
    "a daemon": End(
        "print('done')",
        before="threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
    ),
}
LAUNCHES: dict[str, str] = {
    "a guarded main": "def main():\n    <train>\n\nif __name__ == '__main__':\n    main()",
    "at once": "<train>",
    "under the guard": "if __name__ == '__main__':\n    <train>",
    "argparse": "def main(args):\n    <train>\n\nif __name__ == '__main__':\n    parser = argparse.ArgumentParser()\n"
    "    parser.add_argument('--rate', type=float, default=0.1)\n    main(parser.parse_args())",
    "sys.exit(main())": "def main():\n    <train>\n    return 0\n\nif __name__ == '__main__':\n    sys.exit(main())",
    "an entry class": "class App:\n    def __call__(self):\n        <train>\n\nApp()()",
    "a decorated main": "def timed(f):\n    @functools.wraps(f)\n    def call(*args):\n        return f(*args)\n    return call\n\n"
    "@timed\ndef main():\n    <train>\n\nmain()",
    "a sibling": "import helper\n\ndef main():\n    <train>\n    print(helper.NAME)\n\nif __name__ == '__main__':\n    main()",
}
