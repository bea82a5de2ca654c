//! Products by cuBLASLt: which it can compute, and how they are described to it.
//!
//! It stores matrices by columns, and so does not compute `left · right` but the transposed
//! product, `rightᵀ · leftᵀ`, which lies in memory as the product does by rows. Where all that a
//! spec does with its sums is to scale them and to add numbers to them, the library writes the
//! result (`direct`). Everything else is done by a kernel of ours that reads the sums from the
//! workspace, the same that adds the parts of a product: the library's own functions at the end of
//! a product are not used, for theirs take NaN for 0 where a comparison says so, and ours do not.

use std::sync::Arc;

use slabwise_kernels::dtype::{DType, Lane};
use slabwise_kernels::scalar::{ScalarOp, Value};
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Body, Inst, Operand, Spec, SpecError, ValueId};

use super::emit;
use super::problem::{Axis, Count, Matrix, Problem, merged};
use super::tiles::Elem;
use crate::conv;
use crate::cublaslt::{self, Addresses, Algorithm, Layout};
use crate::libraries::{Library, LibraryError};
use crate::lower::{ByLibrary, Lowered, Target};

/// What addresses of arguments are multiples of, bytes.
pub(crate) const ALIGN: u64 = 16;

/// Most bytes of workspace for one product, whatever it touches itself.
const WORKSPACE_MAX: u64 = 32 << 20;

/// A matrix of one argument, or several, by columns.
#[derive(Clone, Copy, Debug)]
struct Stored {
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

/// Where the sums go.
#[derive(Clone, Copy, Debug)]
enum Destination {
    /// To an argument, scaled and with what is added to them.
    Argument {
        stored: Stored,
        alpha: f32,
        added: Option<(u16, Size)>,
        bias: Option<(u16, Size)>,
    },
    /// To the start of the workspace, as they are.
    Workspace,
}

/// A product that the library computes, with its sizes still symbolic.
#[derive(Clone, Debug)]
pub struct Product {
    left: Stored,
    right: Stored,
    result: Destination,
    /// Rows, columns, length of the contracted side, products.
    sizes: [Count; 4],
    tf32: bool,
    algorithm: Option<Algorithm>,
    /// Bytes of the workspace that sums take before a kernel of ours takes them; the library's own
    /// come behind.
    sums: u64,
    /// What that kernel does, of what is multiplied.
    form: Arc<Form>,
}

/// How products of matrices make up what a spec computes.
#[derive(Clone, Debug)]
struct Form {
    /// What is multiplied.
    multiplied: Problem,
    /// What the spec computes: the same, or the sum of those products.
    problem: Problem,
    /// How many products are added for each of the results, if they are.
    parts: Option<Count>,
}

/// A product for the sizes of a run.
#[expect(
    clippy::large_enum_variant,
    reason = "one at a time, on the stack: a launch allocates nothing"
)]
pub(crate) enum Call {
    /// It has no points.
    Nothing,
    /// Nothing is summed: zeros, so many bytes at the result's address.
    Zeros(u64),
    /// The library is asked for it.
    Multiply(cublaslt::Product, Algorithm),
}

impl Product {
    /// The spec's product as the library could compute it; `None` if it could not.
    pub fn of(spec: &Spec, bounds: &Env, target: &Target) -> Option<Product> {
        forms(spec, bounds)
            .into_iter()
            .find_map(|form| Product::as_form(form, spec, bounds, target))
    }

    fn as_form(form: Form, spec: &Spec, bounds: &Env, target: &Target) -> Option<Product> {
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
        // Both sides have several indices: what has one is no matrix, and there are kernels for
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
                Stored {
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
            sums,
            form,
        };
        // Steps from row to row that are known to fit: longer than a row, and forwards.
        let fits = |l: &Layout| l.stride >= l.rows && l.apart >= 0;
        let described = product.described(bounds);
        [described.a, described.b, described.d]
            .iter()
            .all(fits)
            .then_some(product)
    }

    /// The same, computed by this kernel of the library's.
    pub fn by(self, algorithm: Algorithm) -> Product {
        Product {
            algorithm: Some(algorithm),
            ..self
        }
    }

    /// Which of the library's kernels it is computed by.
    pub fn name(&self) -> String {
        self.algorithm.map_or("cuBLASLt".into(), |algorithm| {
            format!("cuBLASLt algorithm {}", algorithm.id())
        })
    }

    /// What is computed at these sizes.
    pub fn described(&self, env: &Env) -> cublaslt::Product {
        let [rows, columns, deep, products] = self.sizes.map(|count| count.at(env));
        let layout = |stored: &Stored, free: i64| {
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
            turned: [self.right.by_deep, !self.left.by_deep],
            alpha,
            adds,
            bias,
            tf32: self.tf32,
        }
    }

    /// What is to be done for the sizes of a run.
    pub(crate) fn call(&self, env: &Env, library: &cublaslt::Handle) -> Result<Call, LibraryError> {
        let [rows, columns, deep, products] = self.sizes.map(|count| count.at(env));
        if rows == 0 || columns == 0 || products == 0 {
            return Ok(Call::Nothing);
        }
        let described = self.described(env);
        if deep == 0 {
            return Ok(Call::Zeros(
                (rows * columns * products) as u64 * described.d.dtype.bytes() as u64,
            ));
        }
        let planned = self.algorithm.map_or(0, |algorithm| algorithm.workspace);
        let known = self.sizes.iter().all(|count| count.known().is_some());
        if let Some(algorithm) = self.algorithm {
            if known {
                return Ok(Call::Multiply(described, algorithm));
            }
            // What was chosen for the largest sizes may not do for these, or not with the workspace
            // that there is.
            if let Ok(algorithm) = library.checked(&described, &algorithm)
                && algorithm.workspace <= planned
            {
                return Ok(Call::Multiply(described, algorithm));
            }
        }
        let found = library.algorithms(&described, planned, 1)?;
        let none = || LibraryError::Failed {
            library: Library::CublasLt,
            call: "cublasLtMatmulAlgoGetHeuristic",
            status: format!(
                "no way to multiply {rows} × {deep} by {deep} × {columns} within {planned} bytes"
            ),
        };
        found
            .first()
            .map(|&algorithm| Call::Multiply(described, algorithm))
            .ok_or_else(none)
    }

    /// Where its operands lie, given the arguments' and the workspace's addresses.
    pub(crate) fn addresses(
        &self,
        env: &Env,
        argument: impl Fn(u16) -> u64,
        workspace: u64,
    ) -> Addresses {
        let at = |which: u16, offset: Size, dtype: DType| {
            argument(which).wrapping_add_signed(offset.at(env) * dtype.bytes() as i64)
        };
        let of = |stored: &Stored| at(stored.argument, stored.offset, stored.dtype);
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

    /// Most bytes of workspace that the library is offered: as much as the product touches, so that
    /// no plan is much larger for it.
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

    /// The spec by the library: its product, and what is left to do.
    pub fn lower(self, spec: &Spec, bounds: &Env, target: &Target) -> Result<Lowered, SpecError> {
        let workspace = self.sums + self.algorithm.map_or(0, |algorithm| algorithm.workspace);
        let mut lowered = match self.result {
            Destination::Argument { .. } => Lowered::new(Vec::new(), workspace, |_| Vec::new()),
            Destination::Workspace => {
                let parts = self.form.parts.unwrap_or(Count::fixed(1));
                emit::rest_of_library(
                    spec,
                    &self.form.problem,
                    bounds,
                    target,
                    Arc::new(move |env| parts.at(env)),
                    workspace,
                )?
            }
        };
        lowered.by_library = Some(ByLibrary::Product(Box::new(self)));
        Ok(lowered)
    }
}

impl Stored {
    fn layout(&self, rows: i64, columns: i64, products: i64, env: &Env) -> Layout {
        let bytes = self.dtype.bytes() as u64;
        // What an address is a multiple of is the same for all sizes, or it is that of an element.
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

/// The products of matrices that a spec may be, the one that needs the fewest first: a matrix
/// product, or a convolution whose kernel has one element. A convolution is one product where its
/// images lie by channels last, and else one for each image.
fn forms(spec: &Spec, bounds: &Env) -> Vec<Form> {
    let (whole, of_images) = match &spec.body {
        Body::Matmul(body) => (Problem::matmul(spec, body).ok(), None),
        Body::Conv2d(body) => conv::pointwise(spec, body, bounds)
            .map_or((None, None), |[whole, of_images]| {
                (Some(whole), Some(of_images))
            }),
        _ => (None, None),
    };
    let Some(whole) = whole.map(|problem| problem.oriented(spec)) else {
        return Vec::new();
    };
    let apart = of_images.map(|of_images| {
        let multiplied = of_images.oriented(spec);
        match multiplied.deep.len() == whole.deep.len() {
            true => Form {
                problem: multiplied.clone(),
                multiplied,
                parts: None,
            },
            false => Form {
                multiplied,
                problem: whole.clone(),
                parts: Some(whole.deep[0]),
            },
        }
    });
    let form = Form {
        multiplied: whole.clone(),
        problem: whole,
        parts: None,
    };
    std::iter::once(form).chain(apart).collect()
}

/// What a value is of the sums: their multiple, and what is added to them.
#[derive(Clone, Copy)]
pub(crate) struct Linear {
    pub alpha: f32,
    added: Option<u16>,
    bias: Option<u16>,
}

/// Where the library can write the result itself: one store, by rows, of sums that are scaled and
/// added to.
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
        // What is added lies as the result does, and is aligned as it is; numbers for columns are
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
    // Where nothing may be left to sum, the result is zeros from end to end.
    let dense = by_rows[0] == columns.as_size()?
        && (by_rows[2].is(0)
            || Some(by_rows[2]) == columns.as_size()?.checked_mul(rows.as_size()?));
    if deep.known().is_none() && (!dense || added.is_some() || bias.is_some()) {
        return None;
    }
    let (argument, offset) = of(store.operand);
    let stored = Stored {
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

/// Whether the operand that is stored to is loaded, other than to be added as it is.
pub(crate) fn store_is_read(spec: &Spec, stored: u16, added: Option<u16>) -> bool {
    let loaded = spec
        .code
        .iter()
        .any(|inst| matches!(inst, Inst::Load(k) if *k == stored));
    loaded && added != Some(stored)
}

/// The stored value in terms of the sums. `kind` says of an operand whether it has a number for
/// each point (`true`) or for each column.
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
        // The store rounds so.
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
