//! Cases of attention and of its gradients: shapes, layouts of rows and masks, types.

pub mod oracle;

use slabwise_cuda::Target;
use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Attention, AttentionGrad, Body, Dims, Operand, Scores, Spec};

use super::common::layouts::sizes;
use super::common::{Case, Choices};

/// How rows of heads lie in memory, of a space `[batch, heads, rows, width]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Layout {
    /// `[batch, heads, rows, width]`.
    Contiguous,
    /// `[batch, rows, heads, width]`, with vectors of 16 bytes aligned.
    Joined,
    /// The same with other elements before and between the rows, so that none is aligned.
    Apart,
    /// `[batch, heads, width, rows]`.
    Transposed,
    /// `[rows, width]`, the same for every head.
    Shared,
}

pub const LAYOUTS: [Layout; 5] = [
    Layout::Joined,
    Layout::Contiguous,
    Layout::Apart,
    Layout::Transposed,
    Layout::Shared,
];

impl Layout {
    fn operand(self, dtype: DType, [_, h, r, w]: [i64; 4]) -> Operand {
        let (offset, strides) = match self {
            Layout::Contiguous => (0, [h * r * w, r * w, w, 1]),
            Layout::Joined => (8, [r * (h * w + 8), w, h * w + 8, 1]),
            Layout::Apart => (3, [r * (h * w + 5), w, h * w + 5, 1]),
            Layout::Transposed => (0, [h * r * w, r * w, 1, r]),
            Layout::Shared => (1, [0, 0, w, 1]),
        };
        Operand {
            dtype,
            offset: Size::fixed(offset),
            strides: sizes(&strides),
        }
    }
}

/// How the terms of a mask lie in memory, of a space `[batch, heads, queries, keys]`.
#[derive(Clone, Copy, Debug)]
pub enum MaskLayout {
    /// Each pair of each head has its own, at odd offsets.
    Pairs,
    /// The queries and heads of an element of the batch have the same.
    OfKeys,
    /// All heads have the same.
    Shared,
    /// `[heads, keys, queries]`.
    Transposed,
}

impl MaskLayout {
    fn operand(self, dtype: DType, s: &Sizes) -> Operand {
        let (heads, q, k) = (s.heads, s.queries, s.keys);
        let (offset, strides) = match self {
            MaskLayout::Pairs => (3, [heads * q * k, q * k, k, 1]),
            MaskLayout::OfKeys => (0, [k, 0, 0, 1]),
            MaskLayout::Shared => (1, [0, 0, k, 1]),
            MaskLayout::Transposed => (0, [0, q * k, 1, q]),
        };
        Operand {
            dtype,
            offset: Size::fixed(offset),
            strides: sizes(&strides),
        }
    }
}

/// The sizes of a case.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub batch: i64,
    pub heads: i64,
    pub queries: i64,
    pub keys: i64,
    pub width: i64,
    pub columns: i64,
    pub scores: Scores,
    pub types: Types,
    pub mask: Option<(DType, MaskLayout)>,
    /// Whether each head has a past of the run.
    pub has_past: bool,
}

/// The types of operands.
#[derive(Clone, Copy, Debug)]
pub struct Types {
    pub queries: DType,
    pub keys: DType,
    pub values: DType,
    pub result: DType,
    pub dy: DType,
}

impl Types {
    /// All of one type.
    pub const fn of(dtype: DType) -> Types {
        Types {
            queries: dtype,
            keys: dtype,
            values: dtype,
            result: dtype,
            dy: dtype,
        }
    }
}

pub fn plain(queries: i64, keys: i64, width: i64) -> Sizes {
    Sizes {
        batch: 1,
        heads: 2,
        queries,
        keys,
        width,
        columns: width,
        scores: Scores {
            scale: 1.0 / (width as f32).sqrt(),
            soft_cap: None,
            causal: true,
            window: None,
            past: 0,
            step: 1,
        },
        types: Types::of(DType::F32),
        mask: None,
        has_past: false,
    }
}

impl Sizes {
    pub fn with(self, causal: bool, window: Option<u32>, past: i32) -> Sizes {
        Sizes {
            scores: Scores {
                causal,
                window,
                past,
                ..self.scores
            },
            ..self
        }
    }

    pub fn of(self, types: Types) -> Sizes {
        Sizes { types, ..self }
    }

    pub fn masked(self, dtype: DType, layout: MaskLayout) -> Sizes {
        Sizes {
            mask: Some((dtype, layout)),
            ..self
        }
    }

    pub fn with_past(self) -> Sizes {
        Sizes {
            has_past: true,
            ..self
        }
    }

    pub fn capped(self, cap: f32) -> Sizes {
        let scores = Scores {
            soft_cap: Some(cap),
            ..self.scores
        };
        Sizes { scores, ..self }
    }

    /// The number of the first argument behind queries, keys, values, mask and past.
    pub fn first_result(&self) -> usize {
        3 + usize::from(self.mask.is_some()) + usize::from(self.has_past)
    }

    /// The type of operands of products.
    pub fn products(&self) -> DType {
        let Types {
            queries,
            keys,
            values,
            ..
        } = self.types;
        match queries == keys && keys == values {
            true => queries,
            false => DType::F32,
        }
    }

    /// Whether the rows of gradients take turns: those of as many keys as queries do.
    pub fn in_turns(&self) -> bool {
        self.queries == self.keys
    }

    /// The row of the gradient of a query (part 0), a key or a value.
    pub fn row(&self, part: usize, row: usize) -> usize {
        let before = [0, self.queries, self.queries + self.keys].map(|rows| rows as usize);
        match self.in_turns() {
            true => 3 * row + part,
            false => before[part] + row,
        }
    }
}

pub fn spec(body: Body, dims: Dims) -> Spec {
    Spec {
        body,
        dims,
        reduced: 0,
        operands: vec![],
        indices: vec![],
        code: vec![],
        stores: vec![],
    }
}

/// The specs of attention and of its gradient, with layouts of queries, keys, values, result, its
/// gradient, and the gradient of the operands.
pub fn specs(s: &Sizes, layouts: [Layout; 6]) -> [Spec; 2] {
    let t = s.types;
    let of =
        |layout: Layout, dtype, rows, width| layout.operand(dtype, [s.batch, s.heads, rows, width]);
    let attention = |columns| Attention {
        scores: s.scores,
        width: Size::fixed(s.width),
        keys: Size::fixed(s.keys),
        q: of(layouts[0], t.queries, s.queries, s.width),
        k: of(layouts[1], t.keys, s.keys, s.width),
        v: of(layouts[2], t.values, s.keys, columns),
        mask: s.mask.map(|(dtype, layout)| layout.operand(dtype, s)),
        past: s.has_past.then(|| Operand {
            dtype: DType::I32,
            offset: Size::fixed(1),
            strides: sizes(&[s.heads, 1]),
        }),
        result: of(layouts[3], t.result, s.queries, columns),
    };
    let rows = s.queries + 2 * s.keys;
    let grad = AttentionGrad {
        of: attention(s.width),
        queries: Size::fixed(s.queries),
        dy: of(layouts[4], t.dy, s.queries, s.width),
        in_turns: s.in_turns(),
        gradients: of(layouts[5], DType::F32, rows, s.width),
    };
    let dims = |rows, width| sizes(&[s.batch, s.heads, rows, width]);
    [
        spec(
            Body::Attention(Box::new(attention(s.columns))),
            dims(s.queries, s.columns),
        ),
        spec(Body::AttentionGrad(Box::new(grad)), dims(rows, s.width)),
    ]
}

pub fn cases(list: &[Sizes], target: Target) -> Vec<Case> {
    let mut choices = Choices::new(17);
    let mut all = Vec::new();
    for (at, s) in list.iter().enumerate() {
        // Each layout is that of each operand once.
        let input = |i: usize| LAYOUTS[(at + i) % 5];
        let output = |i: usize| LAYOUTS[(at + i) % 4];
        let layouts = [input(0), input(1), input(2), output(3), input(4), output(0)];
        for spec in specs(s, layouts) {
            let name = format!("{s:?} {layouts:?}");
            let mut case = Case::new(name, spec, &mut choices);
            case.target = target;
            fill(s, &mut case);
            all.push(case);
        }
    }
    all
}

/// Gives a mask terms that hide keys, all keys of a query, and the least number to all of another
/// one; and heads pasts within the keys and far behind them.
pub fn fill(s: &Sizes, case: &mut Case) {
    let operands: Vec<Operand> = case.spec.arguments().into_iter().map(|(o, ..)| o).collect();
    if let Some((dtype, _)) = s.mask {
        let row = s.keys as usize;
        let first = operands[3].offset.usize_at(&Env::default());
        let elements = case.args[3].chunks_mut(dtype.bytes()).skip(first);
        for (i, element) in elements.enumerate() {
            let hidden = i % 5 == 1 || i / row == 2;
            let [least, infinite]: [&[u8]; 2] = match dtype {
                DType::F32 => [&f32::MIN.to_le_bytes(), &f32::NEG_INFINITY.to_le_bytes()],
                DType::F16 => [&[0xff, 0xfb], &[0, 0xfc]],
                DType::BF16 => [&[0x7f, 0xff], &[0x80, 0xff]],
                _ => [&[1], &[0]],
            };
            if i / row == 4 {
                element.copy_from_slice(least);
            } else if hidden {
                element.copy_from_slice(infinite);
            }
        }
    }
    if s.has_past {
        let at = s.first_result() - 1;
        let pasts = [9, 3, -4, i32::MAX, 70, 0];
        for (i, element) in case.args[at].chunks_mut(4).skip(1).enumerate() {
            element.copy_from_slice(&pasts[i % pasts.len()].to_le_bytes());
        }
    }
}
