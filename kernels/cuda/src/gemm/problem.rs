//! The abstract form of a product, before a kernel is chosen: which axes run along rows and columns
//! of the result and along the contracted side, and the strides of both operands. Matrix products
//! and convolutions are represented alike.

use slabwise_kernels::dtype::DType;
use slabwise_kernels::size::{Env, Size};
use slabwise_kernels::spec::{Matmul, Operand, QuantizedMatmul, Spec, SpecError};

/// The number of indices of an axis: `(size + add) / div`, rounded down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    /// The size that it depends on.
    pub size: Size,
    /// The number added to the size.
    pub add: i64,
    /// The divisor of the sum.
    pub div: i64,
}

impl Count {
    /// A fixed number.
    pub const fn fixed(n: i64) -> Count {
        Count {
            size: Size::fixed(n),
            add: 0,
            div: 1,
        }
    }

    /// The number under `env`, at least 0.
    pub fn at(self, env: &Env) -> i64 {
        self.size
            .at(env)
            .saturating_add(self.add)
            .div_euclid(self.div)
            .max(0)
    }

    /// The number, where it is fixed.
    pub fn known(self) -> Option<i64> {
        self.size.as_fixed().map(|_| self.at(&Env::default()))
    }

    /// The number as a size, where it has that form.
    pub fn as_size(self) -> Option<Size> {
        match self.known() {
            Some(n) => Some(Size::fixed(n)),
            None => (self.add == 0 && self.div == 1).then_some(self.size),
        }
    }
}

impl From<Size> for Count {
    fn from(size: Size) -> Count {
        Count {
            size,
            add: 0,
            div: 1,
        }
    }
}

/// One axis of the result: index `i` adds `from + i · step` to coordinate `dim` of the spec's
/// space.
#[derive(Clone, Copy, Debug)]
pub struct Axis {
    /// The number of its indices.
    pub count: Count,
    /// The coordinate.
    pub dim: usize,
    /// The contribution of the first index.
    pub from: i64,
    /// The contribution of each further index.
    pub step: Size,
}

impl Axis {
    /// A whole axis of the spec's space.
    pub fn whole(count: impl Into<Count>, dim: usize) -> Axis {
        Axis {
            count: count.into(),
            dim,
            from: 0,
            step: Size::ONE,
        }
    }
}

/// The movement of one side of a windowed operand over the image: index `i` of two neighbouring axes
/// of that side adds `from + i · step` to the row and to the column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// The axis along rows: 0 if the channels are innermost, else 1. That along columns is the next.
    pub axis: usize,
    /// Row and column of the first index.
    pub from: [i64; 2],
    /// Rows and columns per index.
    pub step: [i64; 2],
}

/// The image outside of which a windowed operand is 0.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Height and width.
    pub limits: [Size; 2],
    /// The side that the operand shares with the result.
    pub free: Reach,
    /// The contracted side.
    pub deep: Reach,
}

/// One operand: strides along the axes of the [`Problem`].
#[derive(Clone, Debug)]
pub struct Matrix {
    /// The argument of the spec.
    pub argument: u16,
    /// The stored type.
    pub dtype: DType,
    /// The offset of the first element, as a sum.
    pub offset: Vec<Size>,
    /// Along `Problem::batch`.
    pub batch: Vec<Size>,
    /// Along the side that the operand shares with the result.
    pub free: Vec<Size>,
    /// Along `Problem::deep`.
    pub deep: Vec<Size>,
    /// The window, if the operand is an image with a border of zeros; both sides have three axes
    /// then.
    pub window: Option<Window>,
}

impl Matrix {
    /// An operand before its strides are known.
    pub fn of(argument: u16, operand: &Operand) -> Matrix {
        Matrix {
            argument,
            dtype: operand.dtype,
            offset: vec![operand.offset],
            batch: vec![],
            free: vec![],
            deep: vec![],
            window: None,
        }
    }

    /// The share of the pairs of indices of both sides that lead to different elements: 1 without a
    /// window, whose pairs lead to rows and columns of its image only.
    fn share_of_elements(&self, free: &[Axis], problem: &Problem, env: &Env) -> f64 {
        let Some(window) = self.window else {
            return 1.0;
        };
        let share = |i: usize| {
            let counts = [
                free[window.free.axis + i].count,
                problem.deep[window.deep.axis + i],
            ];
            let pairs: f64 = counts.iter().map(|count| count.at(env) as f64).product();
            (window.limits[i].at(env) as f64 / pairs.max(1.0)).min(1.0)
        };
        share(0) * share(1)
    }
}

/// `result[batch, row, column] = Σ left[batch, row, deep] · right[batch, deep, column]`. The
/// outermost axes come first.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The axes over which products are batched.
    pub batch: Vec<Axis>,
    /// Axes along the rows.
    pub rows: Vec<Axis>,
    /// Axes along the columns.
    pub columns: Vec<Axis>,
    /// The contracted axes.
    pub deep: Vec<Count>,
    /// The left operand.
    pub left: Matrix,
    /// The right operand.
    pub right: Matrix,
}

/// `a · b`, or an error if it overflows.
pub fn product(a: Size, b: Size) -> Result<Size, SpecError> {
    a.checked_mul(b)
        .ok_or_else(|| SpecError::unsupported(format!("a stride of {a:?} · {b:?} elements")))
}

/// The greatest common divisor of two numbers of which one is positive and none negative.
pub fn greatest_common_divisor(a: i64, b: i64) -> i64 {
    if b == 0 {
        a
    } else {
        greatest_common_divisor(b, a % b)
    }
}

/// The number of points of all axes together.
pub fn points(counts: impl IntoIterator<Item = Count>, env: &Env) -> i64 {
    counts
        .into_iter()
        .fold(1, |p, c| p.saturating_mul(c.at(env)))
}

impl Problem {
    /// The elements of both operands that one product reads, each counted once: neighbouring
    /// positions of a window share most of theirs.
    pub fn elements(&self, env: &Env) -> [f64; 2] {
        let [rows, columns, deep, _] = self.sizes(env).map(|n| n as f64);
        let sides = [
            (&self.left, &self.rows, rows),
            (&self.right, &self.columns, columns),
        ];
        sides.map(|(matrix, free, many)| many * deep * matrix.share_of_elements(free, self, env))
    }

    /// A matrix product. Axes along which one operand is broadcast are merged into the rows or
    /// columns of the other, so that a batch of products with one weight is one product.
    pub fn matmul(spec: &Spec, body: &Matmul) -> Result<Problem, SpecError> {
        let rank = spec.dims.len();
        if rank < 2 || body.a.strides.len() != rank || body.b.strides.len() != rank {
            let (a, b) = (body.a.strides.len(), body.b.strides.len());
            return Err(SpecError::unsupported(format!(
                "a product of rank {rank} with {a} and {b} strides"
            )));
        }
        let (mut left, mut right) = (Matrix::of(0, &body.a), Matrix::of(1, &body.b));
        let (mut batch, mut rows, mut columns) = (vec![], vec![], vec![]);
        for (dim, &size) in spec.dims[..rank - 2].iter().enumerate() {
            let (a, b) = (body.a.strides[dim], body.b.strides[dim]);
            let axis = Axis::whole(size, dim);
            if b.is(0) && !a.is(0) {
                rows.push(axis);
                left.free.push(a);
            } else if a.is(0) && !b.is(0) {
                columns.push(axis);
                right.free.push(b);
            } else {
                batch.push(axis);
                left.batch.push(a);
                right.batch.push(b);
            }
        }
        let (m, n) = (rank - 2, rank - 1);
        rows.push(Axis::whole(spec.dims[m], m));
        left.free.push(body.a.strides[m]);
        left.deep.push(body.a.strides[n]);
        columns.push(Axis::whole(spec.dims[n], n));
        right.free.push(body.b.strides[n]);
        right.deep.push(body.b.strides[m]);
        Ok(Problem {
            batch,
            rows,
            columns,
            deep: vec![body.k.into()],
            left,
            right,
        })
    }

    /// A product with quantized weights. The right operand's elements are bytes of packed numbers,
    /// which are neighbours of an axis of their own along the contracted side.
    pub fn quantized(spec: &Spec, body: &QuantizedMatmul) -> Result<Problem, SpecError> {
        if !body.format.has_kernel() {
            return Err(SpecError::unsupported(format!(
                "a product with weights in blocks of {} numbers of {} bits",
                body.format.block, body.format.bits
            )));
        }
        let per_byte = i64::from(body.format.per_byte());
        let [a_row, a_step] = [body.a.strides[0], body.a.strides[1]];
        let bytes = body.format.bytes(body.k.as_fixed().unwrap_or(0));
        Ok(Problem {
            batch: vec![],
            rows: vec![Axis::whole(spec.dims[0], 0)],
            columns: vec![Axis::whole(spec.dims[1], 1)],
            deep: vec![Count::fixed(bytes), Count::fixed(per_byte)],
            left: Matrix {
                free: vec![a_row],
                deep: vec![product(a_step, Size::fixed(per_byte))?, a_step],
                ..Matrix::of(0, &body.a)
            },
            right: Matrix {
                free: vec![body.numbers.strides[0]],
                deep: vec![Size::ONE, Size::ZERO],
                ..Matrix::of(1, &body.numbers)
            },
        })
    }

    /// The same product with rows and columns exchanged.
    fn transposed(self) -> Problem {
        Problem {
            rows: self.columns,
            columns: self.rows,
            left: self.right,
            right: self.left,
            ..self
        }
    }

    /// Exchanges rows and columns if more of the memory that the epilogue loads and stores is
    /// contiguous along rows, because neighbouring threads process neighbouring columns.
    pub fn oriented(self, spec: &Spec) -> Problem {
        let along = |axes: &[Axis]| {
            let Some(inner) = axes.iter().rev().find(|a| a.count.known() != Some(1)) else {
                return 0;
            };
            spec.operands
                .iter()
                .filter(|o| inner.step.is(1) && o.strides[inner.dim].is(1))
                .count()
        };
        if along(&self.rows) > along(&self.columns) {
            self.transposed()
        } else {
            self
        }
    }

    /// Rows, columns, length of the contracted side, products.
    pub fn sizes(&self, env: &Env) -> [i64; 4] {
        let of = |axes: &[Axis]| points(axes.iter().map(|a| a.count), env);
        [
            of(&self.rows),
            of(&self.columns),
            points(self.deep.iter().copied(), env),
            of(&self.batch),
        ]
    }
}

/// The axes of one side of an operand, with their strides.
pub type StridedAxes = Vec<(Count, Size)>;

/// An operand in the form that its kernel needs: contiguous axes are merged, and the side along
/// which neighbours lie is known.
#[derive(Clone, Debug)]
pub struct View {
    /// Along the batch of products.
    pub batch: StridedAxes,
    /// Along the side that the operand shares with the result.
    pub free: StridedAxes,
    /// Along the contracted side.
    pub deep: StridedAxes,
    /// See [`Matrix::window`].
    pub window: Option<Window>,
    /// Whether neighbouring threads should take neighbours along the contracted side.
    pub by_deep: bool,
    /// The number of neighbours in aligned vectors of 16 bytes, or of 8 or 4 if all sizes have those;
    /// 1 if there are none.
    pub vector: i64,
    /// For an operand of a convolution without vectors: height and width of the window that a table
    /// can locate, 1 each if there is no window. See `located.cuh`.
    pub taps: Option<[i64; 2]>,
    offset: Vec<Size>,
}

/// Merges contiguous axes, and drops those of a single index.
pub(super) fn merged(counts: impl Iterator<Item = Count>, strides: &[Size]) -> StridedAxes {
    let mut axes: StridedAxes = Vec::new();
    for (count, &stride) in counts.zip(strides) {
        if count.known() == Some(1) {
            continue;
        }
        let joint = axes.last().and_then(|&(outer, outer_stride)| {
            let (outer, inner) = (outer.as_size()?, count.as_size()?);
            (stride.checked_mul(inner) == Some(outer_stride))
                .then(|| outer.checked_mul(inner))
                .flatten()
        });
        if joint.is_some() {
            axes.pop();
        }
        axes.push((joint.map_or(count, Count::from), stride));
    }
    axes
}

impl View {
    /// The view of a matrix. With `apart` the axes of both sides are not merged.
    pub fn new(
        matrix: &Matrix,
        problem: &Problem,
        free: &[Axis],
        bytes: i64,
        apart: bool,
        bounds: &Env,
    ) -> View {
        let window = matrix
            .window
            .filter(|w| !always_inside(w, free, &problem.deep));
        let axes = |counts: Vec<Count>, strides: &[Size]| match apart || window.is_some() {
            true => counts.into_iter().zip(strides.iter().copied()).collect(),
            false => merged(counts.into_iter(), strides),
        };
        let mut view = View {
            batch: merged(problem.batch.iter().map(|a| a.count), &matrix.batch),
            free: axes(free.iter().map(|a| a.count).collect(), &matrix.free),
            deep: axes(problem.deep.clone(), &matrix.deep),
            window,
            by_deep: false,
            vector: 1,
            taps: None,
            offset: matrix.offset.clone(),
        };
        // The side with the smaller stride; of equal ones, and for a window, that of the pixels,
        // which are many, unless channels are innermost.
        let step = |axes: &StridedAxes| {
            axes.iter()
                .rev()
                .find(|(c, _)| c.known() != Some(1))
                .map_or((i64::MAX, 0), |(c, s)| (s.at(bounds).abs(), -c.at(bounds)))
        };
        view.by_deep = match view.window {
            Some(w) if w.deep.axis == 0 || w.free.axis == 0 => w.deep.axis == 0,
            Some(w) => {
                w.deep.from != [0; 2]
                    || w.free.from == [0; 2] && step(&view.deep) < step(&view.free)
            }
            None => step(&view.deep) < step(&view.free),
        };
        // Runs without vectors move elements one by one, more slowly than a kernel without any, so
        // that shorter ones have to be whole in all runs.
        let lengths = [16, 8, 4].map(|vector| vector / bytes);
        let fits = |&n: &i64| {
            let is_always = view.is_known(n) && !view.ends_partial(n);
            view.is_whole(n, bounds) && (n == lengths[0] || is_always)
        };
        view.vector = lengths.into_iter().find(fits).unwrap_or(1);
        let windows = [&problem.left, &problem.right].map(|m| m.window.is_some());
        if windows != [false; 2] && view.vector < lengths[0] {
            // A table serves rows of windows that lie side by side better than their short vectors.
            if view.located_taps().is_none() && view.steps_over_windows() {
                (view.by_deep, view.vector) = (true, 1);
            }
            if view.vector == 1 {
                view.taps = view.located_taps();
            }
        }
        view
    }

    /// Whether neighbours along the contracted side are pixels a window's width apart, but close:
    /// then more of them lie together than along the short rows of the window.
    fn steps_over_windows(&self) -> bool {
        let (Some((_, step)), Some((width, 1))) = (
            self.deep.last(),
            self.free
                .last()
                .and_then(|(count, stride)| Some((count.known()?, stride.as_fixed()?))),
        ) else {
            return false;
        };
        let is_close = |step: i64| 1 < width && width <= step && step <= 4;
        self.window.is_none() && step.as_fixed().is_some_and(is_close)
    }

    /// See [`View::taps`]: few enough for a table of all along the contracted side, or of the parts
    /// of the window that can lie in the image along the free one.
    fn located_taps(&self) -> Option<[i64; 2]> {
        let [_, across] = self.inner_and_outer();
        if self.window.is_none() {
            return (self.by_deep || across.len() <= 1).then_some([1; 2]);
        }
        let [_, (high, _), (wide, _)] = across[..] else {
            return None;
        };
        let (high, wide) = (high.known()?, wide.known()?);
        let is_few = [high, wide].iter().all(|n| (1..=16).contains(n));
        let fits = if self.by_deep {
            self.spans([high, wide]).iter().all(|&span| span <= 64)
        } else {
            high * wide <= 64
        };
        (is_few && fits).then_some([high, wide])
    }

    /// The movement of the free and of the contracted side over the image, where there is a window.
    /// Positions along the side across threads start at 0, those along the other one elsewhere
    /// instead, because only their sums matter.
    pub fn reaches(&self) -> [Option<Reach>; 2] {
        let Some(Window { free, deep, .. }) = self.window else {
            return [None; 2];
        };
        let from = [0, 1].map(|i| free.from[i] + deep.from[i]);
        [(free, !self.by_deep), (deep, self.by_deep)].map(|(reach, is_along)| {
            let from = if is_along { from } else { [0; 2] };
            Some(Reach { from, ..reach })
        })
    }

    /// Rows and columns of the image from the first element to the last of a window with so many,
    /// if it is the side across threads and free; else 0.
    pub fn spans(&self, taps: [i64; 2]) -> [i64; 2] {
        let window = self.window.filter(|_| self.by_deep);
        let step = window.map_or([0; 2], |w| w.free.step);
        [0, 1].map(|i| (taps[i] - 1) * step[i].abs())
    }

    /// The axes along which neighbours lie, and those of the other side.
    fn inner_and_outer(&self) -> [&StridedAxes; 2] {
        if self.by_deep {
            [&self.deep, &self.free]
        } else {
            [&self.free, &self.deep]
        }
    }

    /// Whether the last vector of so many elements of each row is shorter than the others: rows of
    /// one axis, whose known length is no multiple of a vector's.
    pub fn ends_partial(&self, vector: i64) -> bool {
        match self.inner_and_outer()[0][..] {
            [(count, _)] => count.known().is_some_and(|n| n % vector != 0),
            _ => false,
        }
    }

    /// Whether the elements form aligned vectors of so many, of which the last of each row may be
    /// [partial](View::ends_partial).
    pub fn is_whole(&self, vector: i64, env: &Env) -> bool {
        let [inner, outer] = self.inner_and_outer();
        let Some(((count, stride), rest)) = inner.split_last() else {
            return false;
        };
        let whole = |x: i64| x % vector == 0;
        let others = rest.iter().chain(outer).chain(&self.batch);
        self.has_whole_vectors_in_window()
            && stride.at(env) == 1
            && (whole(count.at(env)) || self.ends_partial(vector))
            && self
                .offset
                .iter()
                .map(|s| s.at(env))
                .fold(0i64, i64::wrapping_add)
                % vector
                == 0
            // Addresses after an axis that has one element in a run have to be aligned, too: an
            // empty copy names them.
            && others
                .filter(|(c, _)| c.known() != Some(1))
                .all(|(_, s)| whole(s.at(env)))
    }

    /// Whether neighbours are channels of one position, all of which or none lie in the image.
    /// Without a window all elements do.
    fn has_whole_vectors_in_window(&self) -> bool {
        let inner = |w: Window| if self.by_deep { w.deep } else { w.free };
        self.window.is_none_or(|w| inner(w).axis == 0)
    }

    /// Whether [`View::is_whole`] is the same for all sizes.
    pub fn is_known(&self, vector: i64) -> bool {
        let mut all_axes = self.batch.iter().chain(&self.free).chain(&self.deep);
        // The number of vectors does not matter.
        let is_known = |(count, stride): &(Count, Size)| {
            let stride = stride.as_fixed();
            stride.is_some_and(|stride| count.known().is_some() || stride % vector == 0)
        };
        all_axes.all(is_known) && self.offset.iter().all(|s| s.as_fixed().is_some())
    }

    /// The offset of the first element.
    pub fn offset(&self, env: &Env) -> i64 {
        self.offset
            .iter()
            .map(|s| s.at(env))
            .fold(0, i64::saturating_add)
    }
}

/// Whether a window never crosses the border of its image, whatever the sizes.
fn always_inside(window: &Window, free: &[Axis], deep: &[Count]) -> bool {
    (0..2).all(|i| {
        let sides = [
            (free[window.free.axis + i].count, window.free),
            (deep[window.deep.axis + i], window.deep),
        ];
        // One side is fixed, and the other visits as many positions as the image has.
        let still = |(count, reach): (Count, Reach)| count.known() == Some(1) && reach.from[i] == 0;
        let visits = |(count, reach): (Count, Reach)| {
            count.as_size() == Some(window.limits[i]) && reach.from[i] == 0 && reach.step[i] == 1
        };
        if still(sides[0]) && visits(sides[1]) || still(sides[1]) && visits(sides[0]) {
            return true;
        }
        let Some(limit) = window.limits[i].as_fixed() else {
            return false;
        };
        let ends = sides.map(|(count, reach)| {
            count.known().map(|n| {
                (
                    reach.from[i],
                    reach.from[i] + (n - 1).max(0) * reach.step[i],
                )
            })
        });
        let [Some(a), Some(b)] = ends else {
            return false;
        };
        a.0.min(a.1) + b.0.min(b.1) >= 0 && a.0.max(a.1) + b.0.max(b.1) < limit
    })
}
