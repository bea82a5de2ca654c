//! The source of a product's epilogue: the spec's program at a point of the result.

use slabwise_kernels::size::Size;
use slabwise_kernels::spec::Spec;

use super::emit::{Writer, divisor, number, sized};
use super::problem::Axis;
use super::totals::Totals;
use crate::code::{Code, Site};
use crate::source::params::Params;

/// The point of an epilogue: coordinates are the variables `c0`, `c1`, …, operand `k` the pointer
/// `a{k}`. Unlike in loops, known sizes are not part of the source, because products have too many
/// shapes to compile a kernel for each.
pub(super) struct Point {
    elements: Vec<String>,
    indices: Vec<String>,
    /// Whether the operands have been loaded before, to the fields of `loaded`.
    ahead: bool,
}

impl Point {
    fn new(spec: &Spec, params: &mut Params) -> Point {
        let mut dot = |strides: &[Size], offset: Size| {
            let mut terms = Vec::new();
            for (dim, &stride) in strides.iter().enumerate().filter(|(_, s)| !s.is(0)) {
                terms.push(if stride.is(1) {
                    format!("c{dim}")
                } else {
                    format!("c{dim} * {}", params.number(&sized(stride)))
                });
            }
            if !offset.is(0) {
                terms.push(params.number(&sized(offset)));
            }
            if terms.is_empty() {
                "0".into()
            } else {
                terms.join(" + ")
            }
        };
        let elements = spec
            .operands
            .iter()
            .map(|o| dot(&o.strides, o.offset))
            .collect();
        let indices = spec.indices.iter().map(|i| dot(i, Size::ZERO)).collect();
        Point {
            elements,
            indices,
            ahead: false,
        }
    }
}

impl Site for Point {
    fn read(&self, k: u16) -> String {
        if self.ahead {
            format!("loaded.l{k}")
        } else {
            self.write(k)
        }
    }
    fn write(&self, k: u16) -> String {
        format!("a{k}[e{k}]")
    }
    fn state(&self, k: u16) -> String {
        format!("a{k} + e{k}")
    }
    fn index(&self, k: u16) -> String {
        format!("int({})", self.indices[usize::from(k)])
    }
    fn acc(&self) -> String {
        "sum".into()
    }
}

impl Writer<'_> {
    /// Declares the coordinates of the point at `batch`, `row` and `column`.
    pub(super) fn point(&mut self) -> (Point, String) {
        let mut text = String::new();
        let mut terms: Vec<Vec<String>> = vec![vec![]; self.spec.dims.len()];
        let sides = [
            ("batch", &self.problem.batch),
            ("row", &self.problem.rows),
            ("column", &self.problem.columns),
        ];
        for (side, axes) in sides {
            let axes: Vec<&Axis> = axes
                .iter()
                .filter(|a| a.count.known() != Some(1) || a.from != 0)
                .collect();
            let mut rest = side.to_string();
            for (i, axis) in axes.iter().enumerate().rev() {
                let along = if i == 0 {
                    rest.clone()
                } else {
                    format!("{side}{i}")
                };
                if i > 0 {
                    let count = axis.count;
                    let words = self.params.block([
                        number(move |env| count.at(env)),
                        number(move |env| divisor(count.at(env))),
                    ]);
                    text += &format!(
                        "const int {side}_{i} = quotient({rest}, p.w[{}]);\n",
                        words + 1
                    );
                    text += &format!(
                        "const int {side}{i} = {rest} - {side}_{i} * int(p.w[{words}]);\n"
                    );
                    rest = format!("{side}_{i}");
                }
                let term = if axis.step.is(1) && axis.from == 0 {
                    format!("idx({along})")
                } else {
                    let (from, step) = (axis.from, axis.step);
                    let words = self.params.block([number(move |_| from), sized(step)]);
                    format!("idx(p.w[{words}]) + idx({along}) * idx(p.w[{}])", words + 1)
                };
                terms[axis.dim].push(term);
            }
        }
        for (dim, terms) in terms.iter().enumerate() {
            text += &format!(
                "const idx c{dim} = {};\n",
                if terms.is_empty() {
                    "0".into()
                } else {
                    terms.join(" + ")
                }
            );
        }
        let point = Point::new(self.spec, &mut self.params);
        for (k, element) in point.elements.iter().enumerate() {
            text += &format!("const idx e{k} = {element};\n");
        }
        (point, text)
    }

    /// The spec's program applied to `sum` at the point at `batch`, `row` and `column`.
    pub(super) fn epilogue(&mut self, code: &Code) -> String {
        let (point, coordinates) = self.point();
        coordinates + &code.point(&point)
    }

    /// The epilogue in two functions: `load(row, column)` reads the operands of the program, so
    /// that the loads of several points overlap, and `take(row, column, sum, loaded)` does the
    /// rest. With totals a third function, `finish(column, all)`, does the work on those of a column.
    pub(super) fn epilogue_ahead(&mut self, code: &Code, totals: Option<&Totals>) -> String {
        let (mut point, coordinates) = self.point();
        let loads = totals.map_or_else(|| code.loads(), |totals| totals.loads(code));
        let fields: String = loads
            .iter()
            .map(|&k| format!("{} l{k};\n", code.storage(k).ty))
            .collect();
        let count = loads.len();
        let values: Vec<String> = loads.iter().map(|&k| point.read(k)).collect();
        let column = totals.map(|totals| totals.column(code, &point, &coordinates));
        point.ahead = true;
        let (declared, program) = match totals {
            Some(totals) => (totals.declaration(), totals.point(code, &point)),
            None => (String::new(), code.point(&point)),
        };
        let column = column.unwrap_or_default();
        format!(
            "{declared}struct Loaded {{\nenum {{ COUNT = {count} }};\n{fields}}};\n\
             const auto load = [&](int row, int column) {{\n{coordinates}return Loaded{{{}}};\n}};\n\
             const auto take = [&](int row, int column, float sum, const Loaded& loaded) {{\n{coordinates}{program}}};\n{column}",
            values.join(", ")
        )
    }
}
