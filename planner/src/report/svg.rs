//! A plan as a picture: every buffer a rectangle of steps × bytes.

use super::Slab;
use crate::bytes::Bytes;
use crate::dag::{Dag, Kind};
use crate::plan::{Plan, live_bytes, peak};
use canvas::{
    CHARACTER, Canvas, Colours, LABEL, LEFT, PLOT_HEIGHT, Rectangle, TOP, WIDTH, shortened,
    text_width,
};
use std::fmt::Write;

mod canvas;
mod packing;

pub(super) use canvas::escaped;
pub use packing::packing_svg;

/// The most tasks whose names are drawn below the steps, and the most characters of each.
const NAMED_TASKS_MAX: usize = 64;
const TASK_NAME_MAX: usize = 26;

/// Fill and outline of a kind.
pub(super) fn colours(kind: Kind) -> Colours {
    match kind {
        Kind::Input => ("#b7d7f0", "#5b93bf"),
        Kind::Weight => ("#cfc3ea", "#8471b5"),
        Kind::State => ("#e3d7ee", "#a48bbd"),
        Kind::Activation => ("#bfe3bd", "#65a563"),
        Kind::Gradient => ("#fbd0a4", "#cf8a3d"),
        Kind::Output => ("#f2b8cf", "#bf5f88"),
        Kind::Workspace => ("#dfe1e4", "#9097a0"),
        Kind::Other => ("#ede3c4", "#b0a067"),
    }
}

/// Draws a plan: steps to the right, bytes upwards, each buffer and workspace a rectangle in the
/// colour of its kind, named if the name fits, with a tooltip (name, size, steps, offset, source);
/// the line of live bytes, the top of the slab, the lower bound if it is smaller, and the step of
/// the peak. A buffer computed in place begins in the middle of the step in which the other ends.
///
/// # Panics
/// If the plan is not one of this dag.
pub fn svg(dag: &Dag, plan: &Plan, title: &str) -> String {
    Picture {
        dag,
        plan,
        canvas: Canvas::new(dag.steps() as f64, plan.height),
    }
    .draw(title)
}

struct Picture<'a> {
    dag: &'a Dag,
    plan: &'a Plan,
    canvas: Canvas,
}

impl Picture<'_> {
    fn draw(&self, title: &str) -> String {
        let rectangles = self.rectangles();
        let names = self.plan.order.len() <= NAMED_TASKS_MAX;
        let longest = self
            .dag
            .tasks
            .iter()
            .map(|task| task.name.chars().count().min(TASK_NAME_MAX))
            .max()
            .unwrap_or(0);
        let below = if names {
            34.0 + longest as f64 * LABEL * CHARACTER * 0.9
        } else {
            50.0
        };
        let subtitle = format!("slab {} · {} tasks", Slab(self.plan), self.dag.tasks.len());
        let mut out = self.canvas.open(title, &subtitle, below);
        self.legend(&mut out, &rectangles);
        self.grid(&mut out);
        rectangles
            .iter()
            .for_each(|(_, rectangle)| self.canvas.rectangle(&mut out, rectangle));
        self.lines(&mut out);
        self.steps(&mut out, names);
        out + "</svg>\n"
    }

    fn rectangles(&self) -> Vec<(Kind, Rectangle<'_>)> {
        let (dag, plan) = (self.dag, self.plan);
        let (mut begins_late, mut ends_early) = (
            vec![false; dag.buffers.len()],
            vec![false; dag.buffers.len()],
        );
        for pair in &plan.reused {
            begins_late[pair.to.index()] = true;
            ends_early[pair.from.index()] = true;
        }
        let half = |yes: bool| if yes { 0.5 } else { 0.0 };
        let mut rectangles = Vec::new();
        for (i, (buffer, live)) in dag.buffers.iter().zip(&plan.lifetimes).enumerate() {
            if live.is_empty() || buffer.occupied_on_device() == 0 {
                continue;
            }
            let mut tooltip = format!(
                "{} · {}\n{} = {} bytes",
                buffer.name,
                buffer.kind.label(),
                Bytes(buffer.bytes),
                buffer.bytes
            );
            let _ = write!(
                tooltip,
                "\nsteps {} to {} · offset {}",
                live.start,
                live.end - 1,
                plan.offsets[i]
            );
            if begins_late[i] {
                tooltip += "\ncomputed in place";
            }
            if !buffer.source.is_empty() {
                let _ = write!(tooltip, "\n{}", buffer.source);
            }
            let rectangle = Rectangle {
                name: &buffer.name,
                colours: colours(buffer.kind),
                start: live.start as f64 + half(begins_late[i]),
                end: live.end as f64 - half(ends_early[i]),
                offset: plan.offsets[i],
                bytes: buffer.bytes,
                tooltip,
            };
            rectangles.push((buffer.kind, rectangle));
        }
        for (step, &id) in plan.order.iter().enumerate() {
            let task = &dag.tasks[id.index()];
            if task.workspace > 0 {
                let offset = plan.workspace_offsets[id.index()];
                let tooltip = format!(
                    "workspace of {}\n{} = {} bytes\nstep {step} · offset {offset}",
                    task.name,
                    Bytes(task.workspace),
                    task.workspace
                );
                let (start, end) = (step as f64, step as f64 + 1.0);
                let colours = colours(Kind::Workspace);
                let rectangle = Rectangle {
                    name: &task.name,
                    colours,
                    start,
                    end,
                    offset,
                    bytes: task.workspace,
                    tooltip,
                };
                rectangles.push((Kind::Workspace, rectangle));
            }
        }
        rectangles
    }

    /// The legend: the kinds that occur, and the lines.
    fn legend(&self, out: &mut String, rectangles: &[(Kind, Rectangle<'_>)]) {
        let mut x = LEFT;
        for kind in Kind::ALL
            .into_iter()
            .filter(|&kind| rectangles.iter().any(|&(other, _)| other == kind))
        {
            let (fill, stroke) = colours(kind);
            let _ = writeln!(
                out,
                "<rect x=\"{x:.1}\" y=\"59\" width=\"11\" height=\"11\" rx=\"1.5\" fill=\"{fill}\" stroke=\"{stroke}\"/><text x=\"{:.1}\" y=\"68\">{}</text>",
                x + 16.0,
                kind.label(),
            );
            x += 16.0 + text_width(kind.label(), LABEL) + 18.0;
        }
        let bound = (self.plan.lower_bound < self.plan.height).then_some(("bound", "lower bound"));
        self.canvas.line_legend(
            out,
            x,
            [("live", "live bytes"), ("slab", "slab")]
                .into_iter()
                .chain(bound),
        );
    }

    /// The lines of bytes, and the column of the peak.
    fn grid(&self, out: &mut String) {
        let (step, _) = peak(self.dag, self.plan);
        let _ = writeln!(
            out,
            "<rect class=\"peak\" x=\"{:.2}\" y=\"{TOP}\" width=\"{:.2}\" height=\"{PLOT_HEIGHT}\"/>",
            self.canvas.x(step as f64),
            self.canvas.x_scale.max(1.0),
        );
        self.canvas.grid(out);
    }

    /// Live bytes, slab and lower bound.
    fn lines(&self, out: &mut String) {
        let mut path = String::new();
        for (step, &bytes) in live_bytes(self.dag, self.plan).iter().enumerate() {
            let command = if step == 0 { 'M' } else { 'L' };
            let (y, right) = (self.canvas.y(bytes), self.canvas.x(step as f64 + 1.0));
            let _ = write!(
                path,
                "{command}{:.2} {y:.2}H{right:.2}",
                self.canvas.x(step as f64)
            );
        }
        self.canvas.lines(out, &path, "slab", self.plan.lower_bound);
    }

    /// The axis: step numbers, task names where there is room for them, and a tooltip per step.
    fn steps(&self, out: &mut String, names: bool) {
        let bottom = TOP + PLOT_HEIGHT;
        let peak = peak(self.dag, self.plan).0;
        let every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
            .into_iter()
            .find(|n| self.dag.steps() / n <= 32);
        let every = every.unwrap_or_else(|| (self.dag.steps() / 32).next_power_of_two());
        let _ = writeln!(
            out,
            "<text class=\"axis\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">step</text>",
            LEFT - 8.0,
            bottom + 13.0
        );
        for (step, &id) in self.plan.order.iter().enumerate() {
            let (x, middle) = (self.canvas.x(step as f64), self.canvas.x(step as f64 + 0.5));
            let name = self.dag.task_name(id);
            let class = if step == peak { "red" } else { "axis" };
            let _ = write!(
                out,
                "<rect x=\"{x:.2}\" y=\"{bottom}\" width=\"{:.2}\" height=\"16\" fill=\"#fff\" fill-opacity=\"0\"><title>step {step} · {}</title></rect>",
                self.canvas.x_scale,
                escaped(name),
            );
            if step % every == 0 || step == peak && names {
                let _ = write!(
                    out,
                    "<text class=\"{class}\" x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{step}</text>",
                    bottom + 13.0
                );
            }
            if names {
                let (y, label) = (bottom + 25.0, shortened(name, TASK_NAME_MAX));
                let x = middle + 3.0;
                let turn = format!("rotate(-65 {x:.1} {y:.1})");
                let _ = write!(
                    out,
                    "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"end\" transform=\"{turn}\">{}</text>",
                    escaped(&label)
                );
            }
            out.push('\n');
        }
        if !names {
            let (x, y) = (self.canvas.x(peak as f64 + 0.5), bottom + 30.0);
            let name = self
                .plan
                .order
                .get(peak)
                .map_or("", |&task| self.dag.task_name(task));
            let anchor = if x > WIDTH / 2.0 { "end" } else { "start" };
            let _ = writeln!(
                out,
                "<text class=\"red\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">peak: step {peak} {}</text>",
                escaped(name)
            );
        }
    }
}
