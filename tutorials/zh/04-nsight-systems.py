# %% [markdown]
"""
# 4. Nsight Systems 与 NVTX

*最后验证：2026-11-15，NVIDIA H200，Nsight Compute 2025.3.1 自带的 nsys。*

Nsight Compute 盯着一个 kernel 看；Nsight Systems（`nsys`）同时看所有东西：主机线程、CUDA 调用、拷贝、每条流上的 kernel，全在同一根时间轴上。它开销很小，看到的接近程序真实的样子。找空隙，就用它。

**读完之后你能够**

- 只录你要的那几步，用命令行也行，在程序运行时手动录也行，不必拖上几个 GB 的无关内容；
- 用五种方式给代码打标记，让时间线说你的话；
- 在 Python 里从 SQLite 导出读出时间线的五个视角，不需要 GPU，也不需要窗口；
- 避开六个毁掉录制的错误，和一个泄密的错误。
"""

# %%
import sys
from pathlib import Path

TUTORIALS = next(p for p in [Path.cwd(), *Path.cwd().parents, Path.cwd() / "tutorials"] if (p / "programs").is_dir())
sys.path.insert(0, str(TUTORIALS / "programs"))

import pictures
import recorded

print(recorded.output("nsys-version"))

# %% [markdown]
"""
## 4.1 用 `nsys profile` 录制

整个过程分三步：在有 GPU 的机器上录（得到 `.nsys-rep`），把文件拷走，在自己的电脑上看（`nsys-ui`，免费）或导出（4.4 节）。一条命令从头录到程序结束：

```bash
nsys profile --trace=cuda,nvtx,osrt --sample=none --cpuctxsw=none \
    --capture-range=cudaProfilerApi --capture-range-end=stop --force-overwrite=true \
    --output=hidden_sync \
    python programs/hidden_sync.py --steps 3
```

| 选项 | 作用 |
| --- | --- |
| `--trace=cuda,nvtx,osrt` | 录什么：CUDA 调用和 kernel、NVTX 区间、操作系统调用；还可以加 `cudnn`、`cublas` |
| `--sample=none --cpuctxsw=none` | 不对主机线程采样：采样要权限，还会拖慢主机 |
| `--capture-range=cudaProfilerApi` | 只录 `torch.cuda.profiler.start()` 到 `stop()` 之间 |
| `--capture-range-end=stop` | 之后停止录制，但让程序继续 |
| `--delay=N --duration=N` | 另一种办法：N 秒后开始，录 N 秒 |
| `--gpu-metrics-devices=all` | 采样 GPU 各部件的忙闲（旧版是 `--gpu-metrics-device`）；要权限 |
| `--cuda-memory-usage=true` | 显存分配 |
| `--cuda-graph-trace=node` | CUDA graph 里面的 kernel，否则整个 graph 只是一块 |
| `--output=NAME --force-overwrite=true` | 写到哪里 |

各版本选项不同，以 `nsys profile --help` 为准。`dpscope nsys` 会按装好的 nsys 拼出这条命令，先预热，再给每种方法录三步，然后读出结果：

```bash
dpscope nsys --methods flat --print-command
```
"""

# %%
print(recorded.output("nsys-profile", last=14))

# %% [markdown]
"""
## 4.2 用 `nsys launch` 手动录制

有时你想先看训练是不是正常，**然后**再录。先在一个会话里启动程序，这时什么都不录。再从另一个终端随时开始、停止，次数不限：

```bash
nsys launch --session-new=lesson --trace=cuda,nvtx python programs/launch_bound.py --steps 5000
nsys sessions list
nsys start --session=lesson --sample=none --force-overwrite=true --output=by_hand
nsys stop --session=lesson
nsys shutdown --session=lesson --kill=sigkill
```

| | `nsys profile` | `nsys launch` |
| --- | --- | --- |
| 何时开始 | 立刻、延迟之后，或由程序决定 | 你说了算 |
| 能录几次 | 一次 | 随便几次 |
| 适合 | 脚本、已知的步 | 长时间训练、"现在变慢了" |

`dpscope nsys --methods flat --launch` 会为 dpscope 的工作负载打印这几行。
"""

# %%
for name in ("nsys-sessions", "nsys-start", "nsys-stop"):
    print(f"$ {name}: {recorded.output(name, last=8)}")

# %% [markdown]
"""
## 4.3 NVTX：让时间线说你的话

几千个叫 `vectorized_elementwise_kernel` 的 kernel 排在一起，什么也看不出来。**NVTX** 区间给代码的各段起名字，一个区间大约花三分之一微秒，可以一直留在代码里。五种写法：

| 方式 | 用 PyTorch | 用 `nvtx` 包（`pip install nvtx`） |
| --- | --- | --- |
| 装饰器 | `@nvtx_range("augment")`（dpscope） | `@nvtx.annotate("augment", color="blue")` |
| 上下文 | `with nvtx_range("forward"):`（dpscope）、`torch.cuda.nvtx.range` | `with nvtx.annotate("forward"):` |
| push 和 pop | `torch.cuda.nvtx.range_push("x")`、`range_pop()` | `nvtx.push_range("x")`、`nvtx.pop_range()` |
| start 和 end | `h = torch.cuda.nvtx.range_start("x")`、`range_end(h)` | `h = nvtx.start_range("x")`、`nvtx.end_range(h)` |
| 自动 | `torch.autograd.profiler.emit_nvtx()`；`dpscope nsys --autograd` | `nvtx.Profile()`；`python -m nvtx script.py` 标记每个函数 |

push/pop 可以嵌套，属于一个线程。start/end 可以交叠，也可以在另一个线程结束。没有 CUDA 的 PyTorch 上 `torch.cuda.nvtx` 会报错；dpscope 的 `nvtx_range` 此时什么都不做，所以同一份代码到处能跑。`programs/annotated.py` 把这些全用上了；下面在我们自己的两层区间里运行它：
"""

# %%
from annotated import train

from dpscope.instruments.nvtx import nvtx_available, nvtx_range


@nvtx_range("a lesson")
def lesson() -> float:
    with nvtx_range("training"):
        return train("cpu", 2)


print(f"loss {lesson():.3f}; ranges go to a profiler: {nvtx_available()}")

# %% [markdown]
"""
**autograd 区间。** 用 `emit_nvtx`，每个算子都是一个区间，正向反向都有；反向的区间带着对应正向算子的序号。从一个反向 kernel 找回引起它的那行代码，靠的就是它。它会产生大量区间，也会拖慢主机：用来看，不用来计时。较新的 nsys 不改代码也能做到：

```bash
nsys profile --trace=cuda,nvtx --pytorch=autograd-nvtx --sample=none \
    --capture-range=cudaProfilerApi --capture-range-end=stop --force-overwrite=true \
    --output=autograd \
    python programs/hidden_sync.py --steps 1
```
"""

# %%
from collections import Counter

from dpscope.instruments.nsys import views
from dpscope.instruments.nsys.reading import read_timeline
from dpscope.reports.trace.capture_figure import draw_capture

autograd = recorded.timeline("autograd")
if autograd:
    names = Counter(r.name.split(",")[0] for r in autograd.ranges)
    print(f"{len(autograd.ranges)} ranges in one step of hidden_sync on the H200; the most frequent:")
    for name, count in names.most_common(8):
        print(f"  {count:4} × {name[:90]}")
else:
    print(recorded.NOT_RECORDED)

# %% [markdown]
"""
## 4.4 从报告到数据库

```bash
nsys export --type=sqlite --force-overwrite=true --output=hidden_sync.sqlite hidden_sync.nsys-rep
nsys stats --report cuda_gpu_kern_sum,cuda_gpu_mem_size_sum,cuda_api_sum,nvtx_gpu_proj_sum \
    --force-export=true hidden_sync.nsys-rep
dpscope nsys --read hidden_sync.sqlite
```

`nsys stats` 打印现成的表。SQLite 文件里每类事件一张表（`CUPTI_ACTIVITY_KIND_KERNEL`、`…_MEMCPY`、`…_RUNTIME`、`NVTX_EVENTS`；名字是指向 `StringIds` 的编号；时间以纳秒计），`correlationId` 把一次启动和它的 kernel 连起来。dpscope 在任何机器上都能读。录下的 `hidden_sync` 用 `dpscope nsys --read` 读出来是这样：
"""

# %%
print(recorded.output("nsys-read", last=24))

# %% [markdown]
"""
## 4.5 时间线的五个视角

例子用 H200 上录下的 `hidden_sync`；如果没有，就用同样来自 H200 的两步小模型 ghost 裁剪。
"""

# %%
timeline, title = recorded.timeline("hidden_sync"), "hidden_sync on an H200, recorded"
if timeline is None:
    timeline, title = (
        read_timeline(recorded.ROOT / "tests" / "data" / "nsys_nvtx_step.sqlite"),
        "ghost clipping on an H200, recorded",
    )
print(
    f"{title}: {len(timeline.activities)} activities of the GPU, {len(timeline.calls)} CUDA calls, {len(timeline.ranges)} ranges"
)

# %% [markdown]
"""
**视角一：GPU 时间线。** 上面是 CUDA 调用，下面是各条流，最上面盖着你的区间。要找的是：流上的空洞；拷贝是和 kernel 并排，还是轮流；从不重叠的流。图中 kernel 越短颜色越淡，所以一行发白就说明 GPU 闲着。
"""

# %%
pictures.show(draw_capture(views.lanes(timeline), title=title), "ranges, CUDA calls and streams")
views.gpu_timeline(timeline).head(4)

# %% [markdown]
"""
图中是 `hidden_sync` 的三步，每步分三段：正向、反向，然后是一段全是红色短线的等待，流几乎是白的。最后那段就是在记录范数。整个录制里 GPU 只忙了 28 %<!-- = busy_percent("hidden_sync") -->。

**视角二：主机与 GPU。** 谁在等谁？花在 `…Synchronize` 上的时间是主机等 GPU：在一步末尾没有关系，在中间就很贵。空隙之后的 kernel 如果当时还没启动，就是 GPU 在等主机。
"""

# %%
views.host_and_gpu(timeline).head(6)

# %% [markdown]
"""
**视角三：从整体到一次启动。** GPU 有多忙；有多少 kernel 比一次启动还短；启动一次要多久；排队排了多久。从启动到开始的时间长是**好事**：说明主机跑在前面。
"""

# %%
for what, value in views.levels(timeline).items():
    print(f"{what:50} {value:10.2f}")

# %% [markdown]
"""
**视角四：链路和机器。** 主机与设备之间搬了什么，从哪种内存，有多快。温度、功耗和链路状态由驱动给出：`nvidia-smi -q` 可以打印；有权限的话，`--gpu-metrics-devices=all` 能把链路和各部件的负载也画到时间线上。
"""

# %%
copies = {name: recorded.timeline(name) for name in ("unpinned_copy", "prefetched_copy")}
for name, seen in copies.items():
    if seen:
        print(name, views.link(seen).to_string(index=False), sep="\n")
        pictures.show(draw_capture(views.lanes(seen), title=f"{name} on an H200, recorded"), f"timeline of {name}")
views.link(timeline)

# %% [markdown]
"""
两条时间线一比就明白：从普通内存拷，拷贝和 kernel 在同一条流上轮流，而且拷得慢（6.2 GB/s<!-- = copies_gb_per_second("unpinned_copy") -->）；预取的那份从锁页内存拷（55.4 GB/s<!-- = copies_gb_per_second("prefetched_copy") -->），单独占一条流，和 kernel 并排。在第二张图里，GPU 第二步还没做完，主机早已把五步的命令全下完了：这就是"主机跑在前面"的样子。

nvidia-smi 的 `utilization.gpu` 是个有名的陷阱：它只是**有任何** kernel 在跑的时间占比。一个 SM 上跑一个线程，也能显示 100 %<!-- given -->。
"""

# %% [markdown]
"""
**视角五：库。** 这些 kernel 是谁的？cuBLAS 和 cuDNN 的只能挑（格式、形状、版本）；PyTorch 的逐元素 kernel 可以融合；你自己的可以重写。
"""

# %%
views.libraries(timeline).head(8)

# %% [markdown]
"""
## 4.6 时间线上的差分隐私一步

dpscope 把一步的各阶段标成 NVTX 区间。11.7 亿参数，批次 8，序列 1024，bf16，H200。一个 kernel 算在它**被启动**时所在的阶段里，不论由哪个线程启动：
"""

# %%
for method in ("standard", "flat", "ghost", "flash"):
    seen = recorded.captured("traces", method)
    phases = ", ".join(f"{p['phase']} {p['gpu_ms']:.1f}" for p in seen["phases"] if p["gpu_ms"] > 0.05)
    print(
        f"{method:9} GPU busy {seen['gpu']['busy_ms']:6.1f} ms, {seen['kernel_total']['calls']:5.0f} kernels; ms by phase: {phases}"
    )

# %% [markdown]
"""
两个互不相干的工具给出了一致的结果：对 flat 裁剪，nsys 说 GPU 每步忙 236.2 ms<!-- = captured("traces", "flat")["gpu"]["busy_ms"] -->，torch.profiler 说 235.8 ms<!-- = traced("traces", "flat")["gpu"]["busy_ms"] -->。

## 4.7 六条注意，再加一条

1. **何时录。** 固定的 `--delay` 会错过你要的步，或者录到预热。让程序自己说（`cudaProfilerApi`）。
2. **录多久。** 几秒，不要几分钟。整个程序录下来有 1.2 GB<!-- given: measured with nsys 2025.3.1, docs/nsys.md's facts -->，而一步不到 0.1 MB<!-- given: the same -->。超过一分钟的，什么工具都打不开。
3. **写到哪。** nsys 写在当前目录，临时文件放在 `TMPDIR`：两处都要有空间、有权限。
4. **谁的文件。** 多台机器共享存储时，输出名里加上主机名（`%h`），否则会互相覆盖。
5. **调度系统**如果在一个 worker 结束时杀掉其余的，别人的报告就断了：手动录（4.2 节）。
6. **权限。** 采样主机需要 `/proc/sys/kernel/perf_event_paranoid` 不大于 2；GPU 指标需要计数器权限。没有就都关掉：CUDA 和 NVTX 两样都不需要。

还有：**报告里有你的环境变量**，shell 里 export 过的每个密钥都在，连其他进程的也可能在。用精简的环境启动 nsys（`env -i …`；`dpscope nsys` 就是这样做的），分享时给清理过的导出（`python -m dpscope.instruments.nsys.stripping`），不要给报告本身。

有些安装只留下原始的 `.qdstrm`；nsys 旁边的 `QdstrmImporter` 能把它变成报告，dpscope 会替你做。

## 练习

1. 上面的时间线里，主机的哪个调用总时间最长？它是在等待吗？
2. 写一个函数，给出 GPU 最长的空隙，以及结束它的 kernel。
3. 有 GPU 的话，用 4.1 节的命令录 `programs/annotated.py`，找到它的各个区间。然后用五个阶段的名字（`forward`、`backward`、`clip`、`noise`、`optimizer`）标记你自己的循环，外面套一层 `step`，`dpscope nsys --read` 就会给出按阶段的表。先在 CPU 上试试：这些区间不该报错。
"""

# %%
# Solution 1
first = views.host_and_gpu(timeline).iloc[0]
print(
    f"{first['call']}: {first['calls']} calls, {first['ms']:.2f} ms, {'waits for the GPU' if first['waits'] else 'does not wait'}"
)


# %%
# Solution 2
def longest_gap(capture):
    table = views.gpu_timeline(capture)
    ended = (table["start_ms"] + table["ms"]).cummax().shift(fill_value=0.0)
    gaps = table["start_ms"] - ended
    gaps.iloc[0] = 0.0
    return gaps.max(), table.loc[gaps.idxmax(), "what"]


length, kernel = longest_gap(timeline)
print(f"{length:.3f} ms without work, ended by {kernel}")

# %%
# Solution 3
from dpscope.vocabulary.phases import PHASES

with nvtx_range("step"):
    for phase in PHASES:
        with nvtx_range(phase):
            pass
print("ranges:", ", ".join(PHASES))

# %% [markdown]
"""
## 小测验

**1. 流那一行是满的，一步还是慢。nsys 还有用吗？**

<details><summary>答案</summary>

它能说出是哪些 kernel 填满的（视角五）。至于一个 kernel 为什么慢，要问 Nsight Compute。

</details>

**2. `cudaStreamSynchronize` 占了主机时间的 90 %<!-- given -->。不好吗？**

<details><summary>答案</summary>

看在哪里。在一步末尾，说明主机快，在等一块忙着的 GPU：好事。在中间，后面流上还有空隙，那就是隐藏的同步。

</details>

**3. 反向传播明明在跑，你的 `backward` 区间里却一个 kernel 都没有。为什么？**

<details><summary>答案</summary>

autograd 从自己的线程启动它们，那里看不到你的 push。调用 `backward()` 的线程这时正等着，所以要像 dpscope 那样，把区间时间内**所有**线程的启动都算进来，或者用 `emit_nvtx`。

</details>

**4. 录制从哪里开始更好，`--delay=120` 还是 `cudaProfilerApi`？**

<details><summary>答案</summary>

后者：它从某一步开始，而不是从某个时刻；换台更快的机器，录的还是那一步。

</details>

## 要记住的

- **何时**和**谁在等**问 nsys，kernel **为什么**慢问 ncu。
- 只录几步，由程序自己标出。
- NVTX 区间几乎不花钱：阶段的名字起一次，所有工具都会说你的话。
- SQLite 导出就是数据：空隙、等待、拷贝、库，都可以计算，也可以写测试。
- 报告里有秘密。分享之前先清理。

**延伸阅读**：[NVIDIA 用户指南](https://docs.nvidia.com/nsight-systems/UserGuide/)、[dpscope 中的 nsys](../../docs/nsys.md)。下一篇：[隐私的代价](05-what-privacy-costs.ipynb)。
"""
