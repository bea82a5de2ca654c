//! Matrix products by cuBLASLt: which products it can compute, and how they are described to it.
//!
//! cuBLASLt stores matrices by columns, and so it does not compute `left · right` but the
//! transposed product, `rightᵀ · leftᵀ`, which lies in memory as the product does by rows. Where a
//! spec only scales its sums and adds numbers to them, the library writes the result (`direct`). In
//! all other cases an epilogue kernel of slabwise reads the sums from the workspace; it is the
//! kernel that also adds the partial sums of a split product. The library's own epilogues are not
//! used because theirs replace NaN by 0 where a comparison says so, and slabwise's do not.

use std::sync::Arc;

use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Inst, Operand, Spec, SpecError, ValueId};

use super::emit;
use super::problem::{Axis, Count, Matrix, Problem, merged};
use super::tiles::Elem;
use crate::abi::Target;
use crate::cublaslt::{self, Addresses, Algorithm, Layout};
use crate::driver::{DriverError, Stream};
use crate::handles::Handles;
use crate::libraries::{Library, LibraryError};
use crate::lowered::{LibraryCall, Lowered, RecentAlgorithms};

/// The alignment of argument addresses, bytes.
pub(crate) const ALIGN: u64 = 16;

/// The workspace limit of one product, bytes, however much memory it touches itself.
const WORKSPACE_MAX: u64 = 32 << 20;

/// The column-major layout of one argument, as one matrix or several.
#[derive(Clone, Copy, Debug)]
struct MatrixOperand {
    argument: u16,
    dtype: DType,
    /// Elements before the first.
    offset: Size,
    /// Whether neighbours lie along the contracted side.
    by_deep: bool,
    /// Elements between neighbours along the other side.
    stride: Size,
    /// Elements from matrix to matrix.
    apart: Size,
}

/// The destination of the sums.
#[derive(Clone, Copy, Debug)]
enum Destination {
    /// An argument: the sums are scaled, and an operand or a bias is added to them.
    Argument {
        stored: MatrixOperand,
        alpha: f32,
        added: Option<(u16, Size)>,
        bias: Option<(u16, Size)>,
    },
    /// The start of the workspace: the raw sums.
    Workspace,
}

/// A product that the library computes, with its sizes still symbolic.
#[derive(Clone, Debug)]
pub struct Product {
    left: MatrixOperand,
    right: MatrixOperand,
    result: Destination,
    /// Rows, columns, length of the contracted side, products.
    sizes: [Count; 4],
    tf32: bool,
    algorithm: Option<Algorithm>,
    /// The algorithms for sizes below the bounds.
    recent: RecentAlgorithms<Algorithm>,
    /// Bytes at the start of the workspace that hold the sums for the epilogue kernel; the
    /// library's own workspace follows.
    sums: u64,
    /// The form that the epilogue kernel finishes.
    form: Arc<Form>,
}

/// How matrix products make up the computation of a spec.
#[derive(Clone, Debug)]
pub(crate) struct Form {
    /// The product that is computed.
    multiplied: Problem,
    /// The problem of the spec: the same product, or the sum of those products.
    problem: Problem,
    /// How many products are added for each of the results, if they are.
    parts: Option<Count>,
}

impl Form {
    /// One product.
    pub fn single(problem: Problem) -> Form {
        Form {
            multiplied: problem.clone(),
            problem,
            parts: None,
        }
    }

    /// The problem of the spec, as a list.
    pub fn problems(&self) -> &[Problem] {
        std::slice::from_ref(&self.problem)
    }

    /// The product `apart` for each element of an axis that `whole` contracts or has along its
    /// columns. In the first case the results are added.
    pub fn of_parts(whole: &Problem, apart: Problem) -> Form {
        if apart.deep.len() == whole.deep.len() {
            return Form::single(apart);
        }
        Form {
            multiplied: apart,
            problem: whole.clone(),
            parts: Some(whole.deep[0]),
        }
    }
}

/// A product at the sizes of one run.
#[expect(
    clippy::large_enum_variant,
    reason = "one at a time, on the stack: a launch allocates nothing"
)]
enum Call {
    /// The product has no points.
    Empty,
    /// The contracted side is empty: zeros, so many bytes at the result's address.
    Zeros(u64),
    /// A call of the library.
    Multiply(cublaslt::Product, Algorithm),
}

impl Product {
    /// The spec's product as the library could compute it in this form; `None` if it could not.
    pub fn of(form: Form, spec: &Spec, bounds: &Env, target: &Target) -> Option<Product> {
        let problem = &form.multiplied;
        let of = |axes: &[Axis]| axes.iter().map(|a| a.count).collect::<Vec<_>>();
        let (rows, columns, batch) = (of(&problem.rows), of(&problem.columns), of(&problem.batch));
        let single = |counts: &[Count], strides: &[Size]| match merged(
            counts.iter().copied(),
            strides,
        )[..]
        {
            [] => Some(None),
            [one] => Some(Some(one)),
            _ => None,
        };
        // Both sides have several indices: with one index it is no matrix, and other kernels do
        // that.
        let stored = |matrix: &Matrix, free: &[Count]| {
            let ((rows, free), (deep, along)) = (
                single(free, &matrix.free)??,
                single(&problem.deep, &matrix.deep)??,
            );
            let products = single(&batch, &matrix.batch)?;
            let by_deep = along.is(1);
            if !by_deep && !free.is(1) || matrix.window.is_some() {
                return None;
            }
            let [offset] = matrix.offset[..] else {
                return None;
            };
            let (dtype, argument) = (matrix.dtype, matrix.argument);
            let stride = if by_deep { free } else { along };
            let apart = products.map_or(Size::ZERO, |(_, apart)| apart);
            Some((
                MatrixOperand {
                    argument,
                    dtype,
                    offset,
                    by_deep,
                    stride,
                    apart,
                },
                [rows, deep, products.map_or(Count::fixed(1), |p| p.0)],
            ))
        };
        let (left, [rows_one, deep, products]) = stored(&problem.left, &rows)?;
        let (right, [columns_one, deep_too, products_too]) = stored(&problem.right, &columns)?;
        if left.dtype != right.dtype
            || Elem::of(left.dtype).is_err()
            || deep != deep_too
            || products != products_too
        {
            return None;
        }
        let sizes = [rows_one, columns_one, deep, products];
        let [m, n, k, p] = sizes.map(|count| count.at(bounds));
        // The library counts in 32 bits.
        if m < 2
            || n < 2
            || k < 1
            || p < 1
            || m.saturating_mul(n).saturating_mul(p) >= i64::from(i32::MAX)
        {
            return None;
        }
        let sides = [&rows[..], &columns[..], &batch[..]];
        let ours = target.guarded || form.parts.is_some();
        let result = direct(spec, problem, sides, left.dtype, sizes)
            .filter(|_| !ours)
            .unwrap_or(Destination::Workspace);
        let sums = match result {
            Destination::Argument { .. } => 0,
            Destination::Workspace => (4 * (m * n * p) as u64).next_multiple_of(256),
        };
        if form.parts.is_some() && sums > WORKSPACE_MAX {
            return None;
        }
        let form = Arc::new(form);
        let product = Product {
            left,
            right,
            result,
            sizes,
            tf32: target.tf32,
            algorithm: None,
            recent: RecentAlgorithms::default(),
            sums,
            form,
        };
        // Strides from row to row must be known to be positive and at least as long as a row.
        let fits = |l: &Layout| l.stride >= l.rows && l.apart >= 0;
        let described = product.described(bounds);
        [described.a, described.b, described.d]
            .iter()
            .all(fits)
            .then_some(product)
    }

    /// The same product, computed by this kernel of the library.
    pub fn by(self, algorithm: Algorithm) -> Product {
        Product {
            algorithm: Some(algorithm),
            ..self
        }
    }

    /// The bytes of the sums that it leaves to a kernel for the epilogue; 0 if it writes the result.
    pub fn sums(&self) -> u64 {
        self.sums
    }

    /// The description of the product at these sizes.
    pub fn described(&self, env: &Env) -> cublaslt::Product {
        let [rows, columns, deep, products] = self.sizes.map(|count| count.at(env));
        let layout = |stored: &MatrixOperand, free: i64| {
            let (rows, columns) = if stored.by_deep {
                (deep, free)
            } else {
                (free, deep)
            };
            stored.layout(rows, columns, products, env)
        };
        let (d, alpha, adds, bias) = match self.result {
            Destination::Argument {
                stored,
                alpha,
                added,
                bias,
            } => {
                let d = stored.layout(columns, rows, products, env);
                (d, alpha, added.is_some(), bias.map(|_| stored.dtype))
            }
            Destination::Workspace => {
                let apart = rows.saturating_mul(columns);
                let d = Layout {
                    dtype: DType::F32,
                    rows: columns,
                    columns: rows,
                    stride: columns,
                    products,
                    apart,
                    align: ALIGN as u32,
                };
                (d, 1.0, false, None)
            }
        };
        let (a, b) = (layout(&self.right, columns), layout(&self.left, rows));
        // By columns, the right operand is columns × deep unless its neighbours lie along the
        // contracted side; the left one is the other way around.
        cublaslt::Product {
            a,
            b,
            d,
            transposed: [self.right.by_deep, !self.left.by_deep],
            alpha,
            adds,
            bias,
            tf32: self.tf32,
        }
    }

    /// The call for the sizes of a run.
    fn call(&self, env: &Env, library: &cublaslt::Handle) -> Result<Call, LibraryError> {
        let [rows, columns, deep, products] = self.sizes.map(|count| count.at(env));
        if rows == 0 || columns == 0 || products == 0 {
            return Ok(Call::Empty);
        }
        let described = self.described(env);
        if deep == 0 {
            return Ok(Call::Zeros(
                (rows * columns * products) as u64 * described.d.dtype.bytes() as u64,
            ));
        }
        let planned = self.algorithm.map_or(0, |algorithm| algorithm.workspace);
        let known = self.sizes.iter().all(|count| count.known().is_some());
        if known && let Some(algorithm) = self.algorithm {
            return Ok(Call::Multiply(described, algorithm));
        }
        let choose = || {
            // The algorithm was chosen for the largest sizes. It may not work for these sizes, or
            // not with the workspace that is available.
            if let Some(algorithm) = self.algorithm
                && let Ok(algorithm) = library.checked(&described, &algorithm)
                && algorithm.workspace <= planned
            {
                return Ok(algorithm);
            }
            let found = library.algorithms(&described, planned, 1)?;
            let none = || LibraryError::Failed {
                library: Library::CublasLt,
                call: "cublasLtMatmulAlgoGetHeuristic",
                status: format!(
                    "no way to multiply {rows} × {deep} by {deep} × {columns} within {planned} bytes"
                ),
            };
            found.first().copied().ok_or_else(none)
        };
        let algorithm = self.recent.get_or(env, choose)?;
        Ok(Call::Multiply(described, algorithm))
    }

    /// The addresses of its operands, given those of the arguments and of the workspace.
    fn addresses(&self, env: &Env, argument: &dyn Fn(u16) -> u64, workspace: u64) -> Addresses {
        let at = |which: u16, offset: Size, dtype: DType| {
            argument(which).wrapping_add_signed(offset.at(env) * dtype.bytes() as i64)
        };
        let of = |stored: &MatrixOperand| at(stored.argument, stored.offset, stored.dtype);
        let mut list = Addresses {
            a: of(&self.right),
            b: of(&self.left),
            workspace: workspace + self.sums,
            ..Addresses::default()
        };
        match self.result {
            Destination::Argument {
                stored,
                added,
                bias,
                ..
            } => {
                list.d = of(&stored);
                list.c = added.map_or(0, |(which, offset)| at(which, offset, stored.dtype));
                list.bias = bias.map_or(0, |(which, offset)| at(which, offset, stored.dtype));
            }
            Destination::Workspace => list.d = workspace,
        }
        list
    }

    /// The workspace limit offered to the library, bytes: as much as the product itself touches, so
    /// that no plan grows much because of it.
    pub fn workspace_max(&self, bounds: &Env) -> u64 {
        let described = self.described(bounds);
        let bytes = |l: &Layout| {
            (l.rows.saturating_mul(l.columns).saturating_mul(l.products)).max(0) as u64
                * l.dtype.bytes() as u64
        };
        [described.a, described.b, described.d]
            .iter()
            .map(bytes)
            .sum::<u64>()
            .min(WORKSPACE_MAX)
    }

    /// The spec computed by the library: its product, then the epilogue kernel if one is needed.
    pub fn lower(self, spec: &Spec, bounds: &Env, target: &Target) -> Result<Lowered, SpecError> {
        let workspace = self.sums + self.algorithm.map_or(0, |algorithm| algorithm.workspace);
        let mut lowered = match self.result {
            Destination::Argument { .. } => Lowered::new(Vec::new(), workspace, |_| Vec::new()),
            Destination::Workspace => {
                let parts = self.form.parts.unwrap_or(Count::fixed(1));
                emit::library_epilogue(
                    spec,
                    &self.form.problem,
                    bounds,
                    target,
                    Arc::new(move |env| parts.at(env)),
                    workspace,
                )?
            }
        };
        lowered.by_library = Some(Box::new(self));
        Ok(lowered)
    }
}

impl LibraryCall for Product {
    fn name(&self) -> String {
        self.algorithm.map_or("cuBLASLt".into(), |algorithm| {
            format!("cuBLASLt algorithm {}", algorithm.id())
        })
    }

    fn open(&self, libraries: &Handles) -> Result<(), LibraryError> {
        libraries.cublaslt().map(|_| ())
    }

    fn check(&self, env: &Env, libraries: &Handles) -> Result<(), LibraryError> {
        self.call(env, libraries.cublaslt()?).map(|_| ())
    }

    unsafe fn submit(
        &self,
        env: &Env,
        argument: &dyn Fn(u16) -> u64,
        workspace: u64,
        libraries: &Handles,
        stream: &Stream,
    ) -> Result<(), DriverError> {
        let library = libraries.cublaslt()?;
        let at = self.addresses(env, argument, workspace);
        match self.call(env, library)? {
            Call::Empty => Ok(()),
            // SAFETY: the result is dense where the contracted side may be empty, and lies in its
            // argument or in the workspace.
            Call::Zeros(bytes) => unsafe { stream.fill(at.d, 0, bytes as usize) },
            Call::Multiply(described, algorithm) => {
                // SAFETY: the product is described by the strides of the arguments' operands, which
                // lie inside of the regions; the workspace is planned with the maximum that the
                // algorithm needs.
                let status = unsafe { library.multiply(&described, &algorithm, &at, stream) };
                status.map_err(DriverError::from)
            }
        }
    }
}

impl MatrixOperand {
    fn layout(&self, rows: i64, columns: i64, products: i64, env: &Env) -> Layout {
        let bytes = self.dtype.bytes() as u64;
        // The alignment of an address must hold for all sizes; otherwise it is that of one element.
        let align = match self.offset.as_fixed() {
            Some(offset) => {
                ALIGN.min(1 << (ALIGN | (offset.unsigned_abs() * bytes)).trailing_zeros())
            }
            None => bytes,
        };
        let (stride, apart) = (self.stride.at(env).max(1), self.apart.at(env));
        Layout {
            dtype: self.dtype,
            rows,
            columns,
            stride,
            products,
            apart,
            align: align as u32,
        }
    }
}

/// A value that is linear in the sums: its scale, and the operands that are added.
#[derive(Clone, Copy)]
pub(crate) struct Linear {
    pub alpha: f32,
    added: Option<u16>,
    bias: Option<u16>,
}

/// The destination and scale where the library can write the result itself: a single store, by
/// rows, of sums that are scaled and added to.
fn direct(
    spec: &Spec,
    problem: &Problem,
    [rows, columns, batch]: [&[Count]; 3],
    operands: DType,
    sizes: [Count; 4],
) -> Option<Destination> {
    let [store] = spec.stores[..] else {
        return None;
    };
    let target = &spec.operands[usize::from(store.operand)];
    if target.dtype != DType::F32 && target.dtype != operands {
        return None;
    }
    let first = (spec.arguments().len() - spec.operands.len()) as u16;
    let along = |operand: &Operand, axes: &[Axis], counts: &[Count]| {
        let strides: Vec<Size> = axes.iter().map(|axis| operand.strides[axis.dim]).collect();
        match merged(counts.iter().copied(), &strides)[..] {
            [] => Some(Size::ZERO),
            [(_, stride)] => Some(stride),
            _ => None,
        }
    };
    let strides = |operand: &Operand| {
        Some([
            along(operand, &problem.rows, rows)?,
            along(operand, &problem.columns, columns)?,
            along(operand, &problem.batch, batch)?,
        ])
    };
    let by_rows = strides(target)?;
    let Linear { alpha, added, bias } = linear(spec, store.value, target.dtype, &|operand| {
        let of = strides(operand)?;
        (operand.dtype == target.dtype).then_some(())?;
        // An added operand must be laid out and aligned as the result is; a bias per column must be
        // aligned as regions are.
        let whole = of == by_rows && operand.offset == target.offset;
        let aligned = operand
            .offset
            .as_fixed()
            .is_some_and(|offset| offset * operand.dtype.bytes() as i64 % ALIGN as i64 == 0);
        let each = of[0].is(0) && of[1].is(1) && of[2].is(0) && aligned;
        (whole || each).then_some(whole)
    })?;
    if !by_rows[1].is(1) || store_is_read(spec, store.operand, added) {
        return None;
    }
    let of = |k: u16| (first + k, spec.operands[usize::from(k)].offset);
    let [rows, columns, deep, _] = sizes;
    // Where the contracted side may be empty, the result is filled with zeros, so it must be dense.
    let dense = by_rows[0] == columns.as_size()?
        && (by_rows[2].is(0)
            || Some(by_rows[2]) == columns.as_size()?.checked_mul(rows.as_size()?));
    if deep.known().is_none() && (!dense || added.is_some() || bias.is_some()) {
        return None;
    }
    let (argument, offset) = of(store.operand);
    let stored = MatrixOperand {
        argument,
        dtype: target.dtype,
        offset,
        by_deep: false,
        stride: by_rows[0],
        apart: by_rows[2],
    };
    Some(Destination::Argument {
        stored,
        alpha,
        added: added.map(of),
        bias: bias.map(of),
    })
}

/// Whether the stored operand is also loaded, other than as the operand that is added.
pub(crate) fn store_is_read(spec: &Spec, stored: u16, added: Option<u16>) -> bool {
    let loaded = spec
        .code
        .iter()
        .any(|inst| matches!(inst, Inst::Load(k) if *k == stored));
    loaded && added != Some(stored)
}

/// The stored value as a linear function of the sums. `kind` says whether an operand has a number
/// for each point (`true`) or for each column.
pub(crate) fn linear(
    spec: &Spec,
    value: ValueId,
    stored: DType,
    kind: &dyn Fn(&Operand) -> Option<bool>,
) -> Option<Linear> {
    let at = |v: ValueId| &spec.code[usize::from(v)];
    match *at(value) {
        Inst::Acc => Some(Linear {
            alpha: 1.0,
            added: None,
            bias: None,
        }),
        Inst::Cast(v, Lane::F32) if !matches!(at(v), Inst::Load(_)) => {
            linear(spec, v, stored, kind)
        }
        // The store itself rounds so.
        Inst::Op(op, [v, ..]) if stored.rounding() == Some(op) => linear(spec, v, DType::F32, kind),
        Inst::Op(ScalarOp::Mul, [a, b, _]) => {
            let (v, &Inst::Const(Value::F32(scale))) = (match (at(a), at(b)) {
                (_, constant @ Inst::Const(_)) => (a, constant),
                (constant @ Inst::Const(_), _) => (b, constant),
                _ => return None,
            }) else {
                return None;
            };
            let of = linear(spec, v, DType::F32, kind)?;
            (of.added.is_none() && of.bias.is_none()).then_some(Linear {
                alpha: of.alpha * scale,
                ..of
            })
        }
        Inst::Op(ScalarOp::Add, [a, b, _]) => {
            let (v, k) = match (at(a), at(b)) {
                (_, Inst::Load(k)) => (a, *k),
                (Inst::Load(k), _) => (b, *k),
                _ => return None,
            };
            let mut of = linear(spec, v, DType::F32, kind)?;
            let place = if kind(&spec.operands[usize::from(k)])? {
                &mut of.added
            } else {
                &mut of.bias
            };
            place.replace(k).is_none().then_some(of)
        }
        _ => None,
    }
}
