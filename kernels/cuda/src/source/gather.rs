//! Gather, and the range check of its indices.

use std::fmt::Write as _;
use std::sync::Arc;

use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{BoundsCheck, Gather, Spec, SpecError};

use super::THREADS;
use super::elementwise::{Anchor, blocks, ordered, pointwise};
use super::params::{Number, Params};
use super::space::Space;
use crate::abi::{Dispatch, Target, Word};
use crate::code::{Code, Storage, lane_type};
use crate::lowered::Lowered;

/// A gather in a space with two more accesses: the source without the gathered axis, and the index.
struct Lookup<'a> {
    gather: &'a Gather,
    source: usize,
    index: usize,
}

impl Lookup<'_> {
    /// Declares `place`, the offset along the gathered axis, and `any`, whether the axis is not
    /// empty.
    fn place(&self, space: &Space, params: &mut Params, coordinates: &[String]) -> String {
        let index = Storage::of(self.gather.index.dtype).widen(&format!(
            "index[{}]",
            space.place(params, self.index, coordinates)
        ));
        let (len, stride) = (
            params.size(self.gather.axis_len),
            params.size(self.gather.axis_stride),
        );
        // An index out of range reads the nearest element, or nothing from an empty axis; the check
        // reports it.
        format!(
            "const bool any = {len} > 0;\nconst idx place = max(idx(0), min(idx({index}), idx({len} - 1))) * {stride};\n"
        )
    }

    fn lane(&self) -> &'static str {
        lane_type(self.gather.source.dtype.lane())
    }
}

impl Anchor for Lookup<'_> {
    fn declare(&self, params: &mut Params) -> String {
        let source = params.pointer("source", Storage::of(self.gather.source.dtype).ty, 0);
        source + &params.pointer("index", Storage::of(self.gather.index.dtype).ty, 1)
    }

    fn at(&self, space: &Space, params: &mut Params, coordinates: &[String]) -> String {
        let mut text = self.place(space, params, coordinates);
        let element = space.place(params, self.source, coordinates);
        let value =
            Storage::of(self.gather.source.dtype).widen(&format!("source[{element} + place]"));
        let _ = writeln!(
            text,
            "const {0} acc = any ? {0}({value}) : {0}(0);",
            self.lane()
        );
        text
    }

    fn vector(
        &self,
        space: &Space,
        params: &mut Params,
        coordinates: &[String],
        width: i64,
    ) -> String {
        let mut text = self.place(space, params, coordinates);
        let (storage, lane) = (Storage::of(self.gather.source.dtype), self.lane());
        let element = space.place(params, self.source, coordinates);
        let _ = writeln!(text, "Vec<{lane}, {width}> accs = {{}};\nif (any) {{");
        let _ = writeln!(
            text,
            "const Vec<{0}, {width}> found = load_vec<Vec<{0}, {width}>>(source + ({element} + place));",
            storage.ty
        );
        let _ = writeln!(
            text,
            "#pragma unroll\nfor (int u = 0; u < {width}; ++u) accs.v[u] = {};\n}}",
            storage.widen("found.v[u]")
        );
        text
    }

    fn moved(&self, space: &Space) -> Option<Vec<(usize, usize)>> {
        let last = space.dims.len() - 1;
        let bytes = self.gather.source.dtype.bytes();
        let one_place =
            space.accesses[self.index].1[last].is(0) && space.accesses[self.source].1[last].is(1);
        // Every offset along the gathered axis must be aligned as well.
        let aligned = self
            .gather
            .axis_stride
            .checked_div(16 / bytes as i64)
            .is_some();
        (one_place && aligned).then(|| vec![(self.source, bytes)])
    }
}

pub fn lower(
    spec: &Spec,
    gather: &Gather,
    bounds: &Env,
    target: &Target,
) -> Result<Lowered, SpecError> {
    let code = Code::new(spec)?;
    let mut space = Space::new(spec);
    let source = space.push(gather.source.offset, &gather.source.strides);
    let index = space.push(gather.index.offset, &gather.index.strides);
    let space = ordered(&code, space, bounds);
    Ok(pointwise(
        "gather",
        &code,
        space,
        &Lookup {
            gather,
            source,
            index,
        },
        bounds,
        target,
    ))
}

/// A kernel that reports the first index out of range, unless an earlier one has reported another.
pub fn lower_check(
    spec: &Spec,
    check: &BoundsCheck,
    bounds: &Env,
    target: &Target,
) -> Result<Lowered, SpecError> {
    let mut space = Space::new(spec);
    let index = space.push(check.index.offset, &check.index.strides);
    // Positions are counted in the order of the axes.
    if space.merge(0, space.dims.len()) == 0 {
        space.insert(0);
    }
    // It writes to no variable.
    let mut params = Params::new(
        spec,
        bounds,
        &Target {
            guarded: false,
            ..*target
        },
    );
    let all = space.clone();
    let count: Number = Arc::new(move |env| all.points(env));
    let mut body = params.pointer("index", Storage::of(check.index.dtype).ty, 0);
    let (fault, step) = (params.address(Word::Fault), params.address(Word::Step));
    let _ = writeln!(
        body,
        "u64* const record = reinterpret_cast<u64*>({fault});\nif (record[1] != ~0ull && record[1] != {step}) return;"
    );
    let _ = writeln!(
        body,
        "const idx count = {}, limit = {};",
        params.number(&count),
        params.size(check.limit)
    );
    let _ = writeln!(body, "const idx threads = idx(gridDim.x) * {THREADS};");
    let _ = writeln!(
        body,
        "for (idx i = idx(blockIdx.x) * {THREADS} + threadIdx.x; i < count; i += threads) {{"
    );
    let (text, coordinates) = params.coordinates("i", &space.dims, "c");
    let value = Storage::of(check.index.dtype).widen(&format!(
        "index[{}]",
        space.place(&mut params, index, &coordinates)
    ));
    let _ = writeln!(
        body,
        "{text}const int value = {value};\nif (value < 0 || value >= limit) {{"
    );
    let _ = writeln!(body, "const u64 position = min(u64(i), u64(0xfffffffeu));");
    let _ = writeln!(
        body,
        "atomicMin(record, position << 32 | unsigned(value));\nrecord[1] = {step};\nreturn;\n}}\n}}"
    );
    let function = params.function("bounds_check", THREADS, &body);
    let target = *target;
    Ok(Lowered::new(vec![function], 0, move |env| {
        let blocks = blocks(space.points(env), THREADS, &target);
        vec![Dispatch::new(0, blocks, THREADS, params.words(env))]
    }))
}

/// The strides of one axis: 1 along it.
pub fn coordinate(axis: usize, rank: usize) -> Vec<Size> {
    (0..rank)
        .map(|a| if a == axis { Size::ONE } else { Size::ZERO })
        .collect()
}
