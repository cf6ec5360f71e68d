"""Results of a row slice: of its elements, one by one, and of the numbers of the whole row, which are known by now.

A CTA takes a segment of one row. The segments that were read last come first: L2 has them still. What becomes of an
element is what a row math makes of it in any other movement, with the state of the whole row in the place of one that
was reduced here.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from ...plan.problem import ALIGNMENT
from ...plan.shards import SliceClass
from ..common import online
from ..common.copy import DTYPES, element, in_global, load, pack, read_policy, unpack
from ..common.index import narrow, select
from ..common.online import Fast, rounded_product
from ..maths.maths import LogSoftmax, LogSoftmaxBackward, Softmax, SoftmaxBackward


class SliceKernel:
    """The kernel of one Plan class, see `cute_softmax.plan.shards`."""

    def __init__(self, spec: SliceClass):
        self.spec = spec
        self.dtypes = [DTYPES[name] for name in spec.dtypes]
        self.full = spec.inputs + 1
        # Scores that were scaled may have any float32's distance from each other.
        source, precise = "fp32" if spec.scaled else spec.dtypes[0], spec.precise
        self.math = {
            "softmax": lambda: Softmax(source, online=True, precise=precise, keep=False),
            "gradient": lambda: Softmax(source, online=True, precise=precise, keep=False),
            "log_softmax": lambda: LogSoftmax(source, online=True, precise=precise, keep=False),
            "softmax_backward": lambda: SoftmaxBackward(keep=False),
            "log_softmax_backward": lambda: LogSoftmaxBackward(precise=precise, masked=False, keep=False),
        }[spec.math]()

    @cute.jit
    def __call__(
        self,
        stream,
        rows: Int32,
        columns: Int32,
        segments: Int32,
        share: Int32,
        evict_last: Int32,
        length: Int64,
        start: Int64,
        ignore: Int64,
        scale: Int64,
        smoothing: Int64,
        squares: Int64,
        *operands: Int64,
    ):
        """Launch; numbers as `SlicePlan` has them; evict_last: see `copy.read_policy`. operands: of each the address in
        bytes and, of full ones and of what flows back, the stride from row to row."""
        s = self.spec
        numbers = length, start, ignore, scale, smoothing, squares
        self.kernel(rows, columns, segments, share, evict_last, numbers, operands).launch(
            grid=[rows * segments, 1, 1],
            block=[s.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=s.min_blocks,
            preferred_smem_carveout=-1,
        )

    @cute.kernel
    def kernel(
        self,
        rows: Int32,
        columns: Int32,
        segments: Int32,
        share: Int32,
        evict_last: Int32,
        numbers: tuple,
        operands: tuple,
    ):
        s = self.spec
        V, K = s.vector, s.steps
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        place = ctas - 1 - cta
        row = place // segments
        segment = place - row * segments

        # Rows of the full operands, by the addresses of their first elements.
        mX = [
            operands[2 * i] + row * operands[2 * i + 1] * (self.dtypes[i].width // 8)
            for i in range(self.full)
        ]
        names, rest = s.operands[self.full :], operands[2 * self.full :]
        head = Int32(0)
        if const_expr(s.edges):
            narrowest = self.dtypes[s.narrowest].width // 8
            head = narrow((mX[s.narrowest] // narrowest) & (V - 1))

        # Load: all vectors of this thread, before what the row has one of is waited for.
        first = segment * share * V - head
        columns_of, exist, whole = [], [], []
        for k in cutlass.range_constexpr(K):
            vector = k * s.threads + tidx
            column = first + vector * V
            columns_of.append(column)
            exist.append((vector < share) & (column < columns))
            whole.append(exist[k] & (column >= 0) & (column + V <= columns))
        policy = read_policy(evict_last)
        rX = [cute.make_rmem_tensor((V, K), self.dtypes[i]) for i in range(self.full)]
        for i in cutlass.range_constexpr(s.inputs):
            for k in cutlass.range_constexpr(K):
                self.load(i, mX[i], rX[i][None, k], columns_of[k], columns, exist[k], whole[k], policy)
        given = dict(zip(self.placed(names), rest, strict=True))
        known = self.of_row(given, rows, row, columns, numbers)

        # Finish and store.
        for k in cutlass.range_constexpr(K):
            values = [unpack(rX[i][None, k]) for i in range(s.inputs)]
            pack(iter(self.results(values, known)), rX[s.inputs][None, k])
            self.store(rX[s.inputs][None, k], mX[s.inputs], columns_of[k], columns, exist[k], whole[k])
            if const_expr(s.chosen):
                target, column = known["target"], columns_of[k]
                if exist[k] & (target >= 0) & (target >= column) & (target < column + V):
                    x = self.score(element(self.dtypes[0], mX[0], target)[0].to(Float32), known)
                    gY = element(self.dtypes[1], mX[1], target)
                    gY[0] = self.at_target(x, known).to(self.dtypes[1])

    def placed(self, names: tuple) -> list[str]:
        """The names of what stands behind the full operands: addresses, and strides of what flows back."""
        found = []
        for name in names:
            found += [name, f"step of {name}"] if name in self.spec.upstream else [name]
        return found

    def vector(self, i: int, address: Int64, column: Int32) -> cute.Tensor:
        size = self.spec.vector * (self.dtypes[i].width // 8)
        return in_global(self.dtypes[i], address, column, self.spec.vector, min(size, ALIGNMENT))

    @cute.jit
    def load(
        self,
        i: cutlass.Constexpr[int],
        address: Int64,
        rX: cute.Tensor,
        column: Int32,
        columns: Int32,
        exists: Boolean,
        whole: Boolean,
        policy: Int64,
    ):
        """A vector of input i: in one access where it lies within the row, else what there is of it."""
        rX.fill(self.dtypes[i](0.0))
        if whole:
            access = min(self.spec.vector, ALIGNMENT * 8 // self.dtypes[i].width)
            load(self.vector(i, address, column), rX, access, policy)
        if const_expr(self.spec.edges):
            self.load_elements(i, address, rX, column, columns, exists & (whole ^ True))

    @cute.jit
    def load_elements(
        self,
        i: cutlass.Constexpr[int],
        address: Int64,
        rX: cute.Tensor,
        column: Int32,
        columns: Int32,
        in_part: Boolean,
    ):
        """What there is of a vector that does not lie within the row: one branch for all of it, as nearly none do."""
        if in_part:
            for v in cutlass.range_constexpr(self.spec.vector):
                if (column + v >= 0) & (column + v < columns):
                    rX[v] = element(self.dtypes[i], address, column + v)[0]

    @cute.jit
    def store(
        self,
        rX: cute.Tensor,
        address: Int64,
        column: Int32,
        columns: Int32,
        exists: Boolean,
        whole: Boolean,
    ):
        """A vector of the output, as `load` does."""
        i = self.spec.inputs
        if whole:
            cute.autovec_copy(rX, self.vector(i, address, column))
        if const_expr(self.spec.edges):
            self.store_elements(rX, address, column, columns, exists & (whole ^ True))

    @cute.jit
    def store_elements(
        self, rX: cute.Tensor, address: Int64, column: Int32, columns: Int32, in_part: Boolean
    ):
        """As `load_elements`."""
        if in_part:
            for v in cutlass.range_constexpr(self.spec.vector):
                gX = element(self.dtypes[self.spec.inputs], address, column + v)
                if (column + v >= 0) & (column + v < columns):
                    gX[0] = rX[v]

    def of_row(self, given: dict, rows: Int32, row: Int32, columns: Int32, numbers: tuple) -> dict:
        """What a row has one of: the state that the math takes, a scale and, of a gradient, what `gradients` gives."""
        s = self.spec
        length, start, ignore, *floats = numbers
        scale, smoothing, squares = (Int32(bits).bitcast(Float32) for bits in floats)
        whole = [
            element(Float32, given["whole"], Int64(rows) * i + row)[0]
            for i in range(1 if s.inputs == 2 else 2 + ("entropy" in s.upstream))
        ]
        known = {"scale": scale}
        if s.inputs == 2:
            return known | {"state": tuple(whole)}
        top, total = whole[:2]
        if isinstance(self.math.exp, Fast):
            ref = online.reference(top)
            known["state"] = top, total * self.math.exp.exponential(ref, ref)
        else:
            known["state"] = top, total
        if not s.upstream:
            return known
        known |= {"top": top, "log": cute.math.log(total), "entropy": whole[-1], "target": Int32(-1)}
        dtype = self.dtypes[-1]
        zero = Float32(0.0)
        g = dict.fromkeys(("found", "lse", "entropy", "even"), zero)
        for name in s.upstream:
            g[name] = element(dtype, given[name], row * given[f"step of {name}"])[0].to(Float32)
        if s.chosen:
            index = element(Int64, given["index"], row)[0]
            if "loss" in s.upstream:
                of_loss = g["loss"] * element(Float32, given["share"])[0] if s.shared else g["loss"]
                of_loss = select(index == ignore, zero, of_loss)
                g["found"] = -of_loss
                if s.smoothed:
                    g["found"], g["even"] = -(1.0 - smoothing) * of_loss, -smoothing * of_loss
                if s.squares:
                    g["lse"] = g["lse"] + 2.0 * squares * (top + known["log"]) * of_loss
            place = index - start
            inside = (place >= 0) & (place < columns)
            known["target"] = Int32(select(inside, place, Int64(-1)))
        factor = scale if s.scaled else Float32(1.0)
        even = g["even"] * cute.arch.rcp_approx(Float32(length)) if self.averages else zero
        known["alpha"] = factor * (g["lse"] - g["found"] - g["even"])
        known["down"], known["even"], known["g"] = -factor * g["entropy"], factor * even, g
        return known

    @property
    def averages(self) -> bool:
        """Whether the mean of all log-probabilities has a gradient."""
        return "even" in self.spec.upstream or self.spec.smoothed

    def score(self, x: Float32, known: dict) -> Float32:
        return rounded_product(x, known["scale"]) if self.spec.scaled else x

    def results(self, values: list, known: dict) -> list[Float32]:
        """What becomes of a vector's elements."""
        s, math = self.spec, self.math
        if s.inputs == 2:
            (found,) = math.finish(values, None, known["state"])
            return [y * known["scale"] for y in found] if s.scaled else [*found]
        scores = [self.score(x, known) for x in values[0]]
        if s.math != "gradient":
            (found,) = math.finish([scores], None, known["state"])
        elif "entropy" in s.upstream:
            found = math.with_logs(scores, known["state"], known["alpha"], known["down"], known["entropy"])
        else:
            found = math.results(scores, None, *known["state"], known["alpha"])
        return [y + known["even"] for y in found] if s.math == "gradient" and self.averages else [*found]

    def at_target(self, score: Float32, known: dict) -> Float32:
        """The gradient of the chosen element, of whose logarithm in the softmax nothing cancels."""
        g, log = known["g"], score - known["top"] - known["log"]
        less = online.less_one(log)
        result = (g["lse"] - g["even"]) * (1.0 + less) - g["found"] * less
        if "entropy" in self.spec.upstream:
            log = online.maximum(log, Float32(online.VANISHES))
            result = result - g["entropy"] * (1.0 + less) * (log + known["entropy"])
        result = result * known["scale"] if self.spec.scaled else result
        return result + known["even"] if self.averages else result
