//! Pooling and its gradient. The gradient gathers: each input element adds the contributions of the
//! windows over it, in row-major order of the windows, so that no two threads write to one element.

use std::fmt::Write as _;

use slabwise_kernels::dtype::Lane;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Operand, Pool2d, Pool2dGrad, PoolKind, Spec, SpecError, Window};

use super::elementwise::{Anchor, ordered, pointwise};
use super::gather::coordinate;
use super::params::Params;
use super::space::Space;
use crate::abi::Target;
use crate::code::{Code, Storage, lane_type};
use crate::lowered::Lowered;

/// An operand's strides along images and channels alone.
fn planes(operand: &Operand) -> [Size; 4] {
    [
        operand.strides[0],
        operand.strides[1],
        Size::ZERO,
        Size::ZERO,
    ]
}

/// The accesses common to both directions: the planes of the operand that is read, and the position
/// in the result's plane.
struct Accesses {
    plane: usize,
    row: usize,
    column: usize,
    /// The positions: where they are stored, or their planes.
    positions: Option<usize>,
}

impl Accesses {
    fn new(space: &mut Space, read: &Operand, positions: Option<(Size, &[Size])>) -> Accesses {
        let plane = space.push(read.offset, &planes(read));
        let row = space.push(Size::ZERO, &coordinate(2, 4));
        let column = space.push(Size::ZERO, &coordinate(3, 4));
        let positions = positions.map(|(offset, strides)| space.push(offset, strides));
        Accesses {
            plane,
            row,
            column,
            positions,
        }
    }

    /// Declares `plane`, `row` and `column`.
    fn declare(&self, space: &Space, params: &mut Params, at: &[String]) -> String {
        let plane = space.place(params, self.plane, at);
        let (row, column) = (
            space.place(params, self.row, at),
            space.place(params, self.column, at),
        );
        format!("const idx plane = {plane}, row = {row}, column = {column};\n")
    }
}

struct Forward<'a> {
    pool: &'a Pool2d,
    accesses: Accesses,
}

impl Anchor for Forward<'_> {
    fn declare(&self, params: &mut Params) -> String {
        let mut text = params.pointer("image", Storage::of(self.pool.x.dtype).ty, 0);
        if let Some(arg) = &self.pool.arg {
            text += &params.pointer("positions", Storage::of(arg.dtype).ty, 1);
        }
        text
    }

    fn at(&self, space: &Space, params: &mut Params, coordinates: &[String]) -> String {
        let (pool, storage) = (self.pool, Storage::of(self.pool.x.dtype));
        let Window { k, stride, pad } = pool.window;
        let mut text = self.accesses.declare(space, params, coordinates);
        let (h, w) = (params.size(pool.hw[0]), params.size(pool.hw[1]));
        let _ = writeln!(
            text,
            "const idx top = row * {} - {}, left = column * {} - {};",
            stride[0], pad[0], stride[1], pad[1]
        );
        // The elements of the window that lie inside of the image.
        let _ = writeln!(
            text,
            "const int r0 = int(max(-top, idx(0))), r1 = int(min(idx({}), {h} - top));",
            k[0]
        );
        let _ = writeln!(
            text,
            "const int s0 = int(max(-left, idx(0))), s1 = int(min(idx({}), {w} - left));",
            k[1]
        );
        let element = params.dot(
            &pool.x.strides[2..],
            &["(top + r)".into(), "(left + s)".into()],
            Size::ZERO,
        );
        let value = storage.widen(&format!("image[plane + {element}]"));
        let each = "for (int r = r0; r < r1; ++r)\nfor (int s = s0; s < s1; ++s) {\n";
        if let PoolKind::Avg { count_pad } = pool.kind {
            let _ = writeln!(text, "float sum = 0.0f;\n{each}sum += {value};\n}}");
            let count = if count_pad {
                (k[0] * k[1]).to_string()
            } else {
                "max(max(r1 - r0, 0) * max(s1 - s0, 0), 1)".into()
            };
            let _ = writeln!(text, "const float acc = sum / float({count});");
            return text;
        }
        // Truth values are compared as 0 and 1.
        let (ty, lowest, nan) = match pool.x.dtype.lane() {
            Lane::F32 => (
                "float",
                "-infinity()",
                " || (value != value && best == best)",
            ),
            Lane::I32 | Lane::Bool => ("int", "(-2147483647 - 1)", ""),
        };
        let _ = writeln!(
            text,
            "{ty} best = {lowest};\nint found = r0 * {} + s0;\n{each}const {ty} value = {value};",
            k[1]
        );
        let _ = writeln!(
            text,
            "if (value > best{nan}) {{\nbest = value;\nfound = r * {} + s;\n}}\n}}",
            k[1]
        );
        if let (Some(arg), Some(access)) = (&pool.arg, self.accesses.positions) {
            let place = space.place(params, access, coordinates);
            let _ = writeln!(
                text,
                "positions[{place}] = {};",
                Storage::of(arg.dtype).narrow("found", Lane::I32)
            );
        }
        let acc = if pool.kind == PoolKind::ArgMax {
            "found"
        } else {
            "best"
        };
        let lane = if pool.kind == PoolKind::ArgMax {
            Lane::I32
        } else {
            pool.x.dtype.lane()
        };
        let _ = writeln!(text, "const {0} acc = {0}({acc});", lane_type(lane));
        text
    }
}

pub fn lower(
    spec: &Spec,
    pool: &Pool2d,
    bounds: &Env,
    target: &Target,
) -> Result<Lowered, SpecError> {
    let code = Code::new(spec)?;
    let mut space = Space::new(spec);
    let accesses = Accesses::new(
        &mut space,
        &pool.x,
        pool.arg.as_ref().map(|arg| (arg.offset, &arg.strides[..])),
    );
    let space = ordered(&code, space, bounds);
    Ok(pointwise(
        "pool",
        &code,
        space,
        &Forward { pool, accesses },
        bounds,
        target,
    ))
}

struct Backward<'a> {
    pool: &'a Pool2dGrad,
    /// Height and width of the image.
    hw: [Size; 2],
    accesses: Accesses,
}

impl Anchor for Backward<'_> {
    fn declare(&self, params: &mut Params) -> String {
        let mut text = params.pointer("gradient", "float", 0);
        if let Some(arg) = &self.pool.arg {
            text += &params.pointer("positions", Storage::of(arg.dtype).ty, 1);
        }
        text
    }

    fn at(&self, space: &Space, params: &mut Params, coordinates: &[String]) -> String {
        let pool = self.pool;
        let Window { k, stride, pad } = pool.window;
        let mut text = self.accesses.declare(space, params, coordinates);
        // The windows over this position, by rows and columns: from the first whose end reaches it
        // to the last that begins before it.
        for (axis, at, from, to) in [(0, "row", "i0", "i1"), (1, "column", "j0", "j1")] {
            let count = params.size(pool.ohw[axis]);
            let (reach, pad, stride) = (
                pad[axis] as i64 + 1 - k[axis] as i64,
                pad[axis],
                stride[axis],
            );
            let _ = writeln!(
                text,
                "const idx {from} = ({at} + {reach} > 0 ? ({at} + {reach} + {stride} - 1) / {stride} : 0);"
            );
            let _ = writeln!(
                text,
                "const idx {to} = min(idx({count}), ({at} + {pad}) / {stride} + 1);"
            );
        }
        let window = ["i".to_string(), "j".to_string()];
        let element = params.dot(&pool.dy.strides[2..], &window, Size::ZERO);
        let mut term = format!("gradient[plane + {element}]");
        let _ = writeln!(text, "float acc = 0.0f;");
        if let (Some(_), Some(access)) = (&pool.arg, self.accesses.positions) {
            let _ = writeln!(
                text,
                "const idx marks = {};",
                space.place(params, access, coordinates)
            );
        }
        let _ = writeln!(
            text,
            "for (idx i = i0; i < i1; ++i)\nfor (idx j = j0; j < j1; ++j) {{"
        );
        let _ = writeln!(
            text,
            "const int r = int(row + {} - i * {}), s = int(column + {} - j * {});",
            pad[0], stride[0], pad[1], stride[1]
        );
        match (&pool.arg, pool.kind) {
            (Some(arg), _) => {
                let mark = params.dot(&arg.strides[2..], &window, Size::ZERO);
                let position = Storage::of(arg.dtype).widen(&format!("positions[marks + {mark}]"));
                term = format!("{position} == r * {} + s ? {term} : 0.0f", k[1]);
            }
            (None, PoolKind::Avg { count_pad: true }) => {
                term = format!("{term} / {}.0f", k[0] * k[1])
            }
            (None, _) => {
                let (h, w) = (params.size(self.hw[0]), params.size(self.hw[1]));
                let _ = writeln!(text, "const idx top = row - r, left = column - s;");
                let inside = |first: &str, k: usize, n: &str| {
                    format!("(min(idx({k}), {n} - {first}) - max(-{first}, idx(0)))")
                };
                term = format!(
                    "{term} / float({} * {})",
                    inside("top", k[0], &h),
                    inside("left", k[1], &w)
                );
            }
        }
        let _ = writeln!(text, "acc += {term};\n}}");
        text
    }
}

pub fn lower_grad(
    spec: &Spec,
    pool: &Pool2dGrad,
    bounds: &Env,
    target: &Target,
) -> Result<Lowered, SpecError> {
    let code = Code::new(spec)?;
    let mut space = Space::new(spec);
    let positions = pool.arg.as_ref().map(|arg| (arg.offset, planes(arg)));
    let accesses = Accesses::new(
        &mut space,
        &pool.dy,
        positions
            .as_ref()
            .map(|(offset, strides)| (*offset, &strides[..])),
    );
    let space = ordered(&code, space, bounds);
    let hw = [spec.dims[2], spec.dims[3]];
    Ok(pointwise(
        "pool_grad",
        &code,
        space,
        &Backward { pool, hw, accesses },
        bounds,
        target,
    ))
}
