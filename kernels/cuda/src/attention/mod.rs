//! Attention whose scores are never in memory, and its gradients, as in Dao, "FlashAttention-2"
//! (2023): tiles of scores are computed in registers, their softmax tile by tile.
//!
//! The backward pass is two launches. The first computes the gradients of queries, and with them the
//! statistics of each query's softmax, which lie in the workspace; the second computes the gradients
//! of keys and values. No block adds to the sums of another, so that every run gives the same bits.

mod tiles;

use std::sync::Arc;

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Attention, AttentionGrad, Operand, Scores, Spec, SpecError};

use crate::abi::{Dispatch, Function, Target, Word};
use crate::code::Storage;
use crate::lowered::Lowered;
use crate::source::params::{Number, Params};
use crate::source::space::points;
use tiles::{Pass, Products, Tile, WIDEST};

/// Most queries, keys, preceding keys and keys of a window: their sums are numbers of 32 bits.
const LONGEST: i64 = 1 << 28;

/// Whether a device has kernels for attention of these scores, or for its gradient. Each operand has
/// a type and rows of so many elements; they are queries, keys and values, and for the gradient the
/// result and its gradient.
pub fn has_attention(target: &Target, scores: &Scores, operands: &[(DType, Size)]) -> bool {
    if !is_able(target) {
        return false;
    }
    let Scores { window, past, .. } = *scores;
    let narrow = |&(dtype, width): &(DType, Size)| {
        dtype.is_float() && width.as_fixed().is_some_and(|n| n <= WIDEST)
    };
    let near = |n: i64| (0..=LONGEST).contains(&n);
    // A mask and a past of the run are further operands; the past is of integers.
    let known = matches!(operands.len(), 3 | 5) && operands.iter().all(narrow);
    known && scores.is_plain() && near(past.into()) && window.is_none_or(|n| near(n.into()))
}

/// Whether the kernels run on a device: they copy asynchronously, and share rows among 32 lanes.
fn is_able(target: &Target) -> bool {
    target.sm >= 80 && target.wave_width == 32
}

fn number(f: impl Fn(&Env) -> i64 + Send + Sync + 'static) -> Number {
    Arc::new(f)
}

fn sized(size: Size) -> Number {
    number(move |env| size.at(env))
}

/// The lengths of a spec.
#[derive(Clone)]
struct Shape {
    heads: Vec<Size>,
    queries: Size,
    keys: Size,
    width: Size,
    columns: Size,
    scores: Scores,
    products: Products,
}

impl Shape {
    fn new(spec: &Spec, of: &Attention, [queries, columns]: [Size; 2], target: &Target) -> Shape {
        Shape {
            heads: spec.dims[..spec.dims.len() - 2].to_vec(),
            queries,
            keys: of.keys,
            width: of.width,
            columns,
            scores: of.scores,
            products: Products::of(of, target),
        }
    }

    fn check(&self, bounds: &Env, target: &Target) -> Result<(), SpecError> {
        let Scores { window, past, .. } = self.scores;
        if !self.scores.is_plain() || past < 0 {
            return Err(SpecError::unsupported("attention of such scores"));
        }
        let lengths = [self.queries, self.keys].map(|size| size.at(bounds));
        let near = [i64::from(past), i64::from(window.unwrap_or(0))];
        if let Some(long) = lengths.iter().chain(&near).find(|n| **n > LONGEST) {
            return Err(SpecError::unsupported(format!(
                "attention over {long} positions"
            )));
        }
        if !is_able(target) {
            return Err(SpecError::unsupported(format!(
                "attention needs waves of 32 lanes and compute capability 8.0, not {} lanes and {}.{}",
                target.wave_width,
                target.sm / 10,
                target.sm % 10
            )));
        }
        Ok(())
    }

    /// The tile of a kernel, by the sizes at the bounds.
    fn tile(&self, pass: Pass, bounds: &Env, target: &Target) -> Result<Tile, SpecError> {
        let width = self.width.at(bounds).max(self.columns.at(bounds));
        let rows = self.rows(pass).at(bounds);
        let heads = points(&self.heads, bounds);
        let tile = pass.tile(self.products, [heads, rows, width], target)?;
        match blocks(heads, rows, tile.rows) <= i64::from(i32::MAX) {
            true => Ok(tile),
            false => Err(SpecError::unsupported(format!(
                "attention of {heads} heads"
            ))),
        }
    }

    /// The rows that the blocks of a kernel share among them.
    fn rows(&self, pass: Pass) -> Size {
        match pass {
            Pass::Forward | Pass::Queries => self.queries,
            Pass::Keys => self.keys,
        }
    }

    /// The words of `AttentionShape` in `kernels.cuh`.
    fn words(&self) -> [Number; 8] {
        let Scores {
            scale,
            causal,
            window,
            past,
            ..
        } = self.scores;
        let behind = window.map_or(2 * LONGEST, i64::from);
        let ahead = if causal { 1 } else { behind };
        let fixed = |n: i64| number(move |_| n);
        [
            sized(self.queries),
            sized(self.keys),
            sized(self.width),
            sized(self.columns),
            fixed(i64::from(past)),
            fixed(behind),
            fixed(ahead),
            fixed(i64::from(scale.to_bits())),
        ]
    }
}

fn blocks(heads: i64, rows: i64, tile: i64) -> i64 {
    heads.saturating_mul((rows + tile - 1) / tile)
}

/// Whether rows of so many elements consist of aligned vectors of 16 bytes.
fn in_vectors(operand: &Operand, width: Size) -> bool {
    let elements = 16 / operand.dtype.bytes() as i64;
    let whole = |size: Size| size.checked_div(elements).is_some();
    let Some((last, others)) = operand.strides.split_last() else {
        return false;
    };
    last.is(1) && whole(operand.offset) && whole(width) && others.iter().all(|&s| whole(s))
}

/// The source of a kernel under construction.
struct Writer<'a> {
    shape: &'a Shape,
    params: Params,
    body: String,
}

impl<'a> Writer<'a> {
    /// Declares the lengths, and the head and the tile of the block.
    fn new(shape: &'a Shape, pass: Pass, tile: &Tile, mut params: Params) -> Writer<'a> {
        let at = params.block(shape.words());
        let (rows, high) = (shape.rows(pass), tile.rows);
        let tiles = params.block([number(move |env| (rows.at(env) + high - 1) / high)]);
        // Of causal attention, the last queries and the first keys have the most to do.
        let order = match pass {
            Pass::Forward | Pass::Queries => "tiles - 1 - int(blockIdx.x) % tiles",
            Pass::Keys => "int(blockIdx.x) % tiles",
        };
        let mut body = format!(
            "const AttentionShape shape(p.w + {at});\n\
             const int tiles = int(p.w[{tiles}]), head = int(blockIdx.x) / tiles, tile = {order};\n"
        );
        let heads: Vec<String> = shape
            .heads
            .iter()
            .map(|&d| params.number(&sized(d)))
            .collect();
        body += &Params::split("head", &heads, "h").0;
        Writer {
            shape,
            params,
            body,
        }
    }

    /// Declares the rows of an operand, those of this head.
    fn rows(&mut self, name: &str, argument: u16, operand: &Operand, width: Size) {
        self.some_rows(name, argument, operand, width, (sized(Size::fixed(0)), 1));
    }

    /// Declares the rows of an operand from the first given on, each so many behind the one before.
    fn some_rows(
        &mut self,
        name: &str,
        argument: u16,
        operand: &Operand,
        width: Size,
        (first, every): (Number, i64),
    ) {
        let batch = self.shape.heads.len();
        let (offset, apart) = (operand.offset, operand.strides[batch]);
        let first = number(move |env| offset.at(env) + first(env) * apart.at(env));
        let mut place = self.params.number(&first);
        for (axis, &stride) in operand.strides[..batch].iter().enumerate() {
            place += &format!(" + h{axis} * {}", self.params.number(&sized(stride)));
        }
        let address = self.params.address(Word::Argument(argument));
        let row = self
            .params
            .number(&number(move |env| every * apart.at(env)));
        let column = self.params.number(&sized(operand.strides[batch + 1]));
        let (ty, vectors) = (Storage::of(operand.dtype).ty, in_vectors(operand, width));
        self.body += &format!(
            "const AttentionRows<{ty}, idx, {vectors}> {name}{{reinterpret_cast<{ty}*>({address}) + {place}, {row}, {column}}};\n"
        );
    }

    /// Declares the statistics of this head's queries.
    fn statistics(&mut self) {
        let (heads, queries) = (self.shape.heads.clone(), self.shape.queries);
        let address = self.params.address(Word::Workspace(0));
        let all = self
            .params
            .block([number(move |env| points(&heads, env) * queries.at(env))]);
        self.body += &format!(
            "float* const logarithms = reinterpret_cast<float*>({address}) + u64(head) * unsigned(shape.queries);\n\
             const AttentionStatistics statistics{{logarithms, logarithms + p.w[{all}]}};\n"
        );
    }

    /// The kernel, which takes these declared values.
    fn kernel(mut self, pass: Pass, tile: &Tile, values: &str) -> Kernel {
        let (source, bounds) = tile.source(self.shape.products);
        self.body += &format!(
            "SHARED_BYTES(unsigned char, shared);\n{}<{source}>(shape, tile, {values}, shared);\n",
            pass.function()
        );
        let function =
            self.params
                .function(&tile.name(pass, self.shape.products), bounds, &self.body);
        let (params, tile) = (self.params, *tile);
        let (heads, rows) = (self.shape.heads.clone(), self.shape.rows(pass));
        let dispatch = move |env: &Env| {
            let blocks = blocks(points(&heads, env), rows.at(env), tile.rows);
            Dispatch {
                function: 0,
                // Sizes at the bounds were validated.
                grid: [u32::try_from(blocks).unwrap_or(u32::MAX), 1, 1],
                block: [tile.threads() as u32, 1, 1],
                shared_bytes: tile.shared_bytes(pass) as u32,
                words: params.words(env),
            }
        };
        Kernel {
            function,
            dispatch: Box::new(dispatch),
        }
    }
}

/// A kernel and its launch for the sizes of a run.
struct Kernel {
    function: Function,
    dispatch: Box<dyn Fn(&Env) -> Dispatch + Send + Sync>,
}

/// The kernel of [`Body::Attention`](slabwise_kernels::spec::Body::Attention).
pub fn lower(
    spec: &Spec,
    of: &Attention,
    bounds: &Env,
    target: &Target,
) -> Result<Lowered, SpecError> {
    let [.., queries, columns] = spec.dims[..] else {
        return Err(SpecError::unsupported("attention without rows"));
    };
    let shape = Shape::new(spec, of, [queries, columns], target);
    shape.check(bounds, target)?;
    let pass = Pass::Forward;
    let tile = shape.tile(pass, bounds, target)?;
    let mut writer = Writer::new(&shape, pass, &tile, Params::new(spec, bounds, target));
    let Attention {
        scores: _,
        keys: _,
        width,
        q,
        k,
        v,
        mask: None,
        past: None,
        result,
    } = of
    else {
        return Err(SpecError::unsupported(
            "attention with a mask or a past of the run",
        ));
    };
    writer.rows("q", 0, q, *width);
    writer.rows("k", 1, k, *width);
    writer.rows("v", 2, v, columns);
    writer.rows("y", 3, result, columns);
    let kernel = writer.kernel(pass, &tile, "q, k, v, y");
    let launches = move |env: &Env| vec![(kernel.dispatch)(env)];
    Ok(Lowered::new(vec![kernel.function], 0, launches))
}

/// The first row of the gradients of queries (part 0), keys or values, and the rows from one to the
/// next.
fn gradient_rows(grad: &AttentionGrad, part: i64) -> (Number, i64) {
    let (queries, keys) = (grad.queries, grad.of.keys);
    match (grad.in_turns, part) {
        (true, _) => (number(move |_| part), 3),
        (false, 0) => (number(|_| 0), 1),
        (false, _) => (
            number(move |env| queries.at(env) + (part - 1) * keys.at(env)),
            1,
        ),
    }
}

/// The kernels of [`Body::AttentionGrad`](slabwise_kernels::spec::Body::AttentionGrad).
pub fn lower_grad(
    spec: &Spec,
    grad: &AttentionGrad,
    bounds: &Env,
    target: &Target,
) -> Result<Lowered, SpecError> {
    let (of, width) = (&grad.of, grad.of.width);
    if of.mask.is_some() || of.past.is_some() {
        return Err(SpecError::unsupported(
            "gradients of attention with a mask or a past of the run",
        ));
    }
    let shape = Shape::new(spec, of, [grad.queries, width], target);
    shape.check(bounds, target)?;
    let mut functions = Vec::new();
    let mut dispatches = Vec::new();
    for (pass, values) in [
        (Pass::Queries, "q, k, v, y, dy, dq, statistics"),
        (Pass::Keys, "q, k, v, dy, dk, dv, statistics"),
    ] {
        let tile = shape.tile(pass, bounds, target)?;
        let mut writer = Writer::new(&shape, pass, &tile, Params::new(spec, bounds, target));
        writer.rows("q", 0, &of.q, width);
        writer.rows("k", 1, &of.k, width);
        writer.rows("v", 2, &of.v, width);
        if pass == Pass::Queries {
            writer.rows("y", 3, &of.result, width);
        }
        writer.rows("dy", 4, &grad.dy, width);
        let parts = match pass {
            Pass::Queries => &[("dq", 0)][..],
            _ => &[("dk", 1), ("dv", 2)],
        };
        for &(name, part) in parts {
            let rows = gradient_rows(grad, part);
            writer.some_rows(name, 5, &grad.gradients, width, rows);
        }
        writer.statistics();
        let kernel = writer.kernel(pass, &tile, values);
        functions.push(kernel.function);
        dispatches.push(kernel.dispatch);
    }
    let queries = points(&shape.heads, bounds).saturating_mul(grad.queries.at(bounds));
    let workspace = 2 * size_of::<f32>() as u64 * queries.max(0) as u64;
    Ok(Lowered::new(functions, workspace, move |env| {
        let each = dispatches.iter().enumerate();
        each.map(|(function, dispatch)| Dispatch {
            function,
            ..dispatch(env)
        })
        .collect()
    }))
}
