//! A plan as a picture: every buffer a rectangle of steps × bytes.

use super::Slab;
use crate::bytes::Bytes;
use crate::dag::{Dag, Kind};
use crate::plan::{Plan, live_bytes, peak};
use std::fmt::Write;

const WIDTH: f64 = 1240.0;
const LEFT: f64 = 92.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 86.0;
const PLOT_HEIGHT: f64 = 520.0;
const PLOT_WIDTH: f64 = WIDTH - LEFT - RIGHT;
/// Width of a character of the monospaced font, against its size.
const CHARACTER: f64 = 0.602;
const LABEL: f64 = 10.0;
/// Up to how many tasks their names stand below the steps, and how much of each.
const NAMED_TASKS_MAX: usize = 64;
const TASK_NAME_MAX: usize = 26;

const STYLE: &str = "\
text{font-family:ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;font-size:10px;fill:#24292f}\
.title{font-size:16px;font-weight:bold}.sub{font-size:11.5px;fill:#57606a}.axis{fill:#57606a}.size{fill:#57606a;font-size:9px}\
.grid{stroke:#e7eaee;stroke-width:1}.frame{stroke:#8c959f;stroke-width:1;fill:none}\
.live{stroke:#24292f;fill:none;stroke-linejoin:round;opacity:.75}\
.slab{stroke:#cf222e;stroke-width:1.4}.bound{stroke:#cf222e;stroke-width:1;stroke-dasharray:5 4}.peak{fill:#cf222e;fill-opacity:.07}\
.red{fill:#cf222e}.b:hover{stroke:#000;stroke-width:1.5}";

/// Fill and outline of a kind.
fn colours(kind: Kind) -> (&'static str, &'static str) {
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

/// Draws a plan: steps to the right, bytes upwards, each buffer and workspace a rectangle in the colour of its kind, named
/// where the name fits, with a tooltip (name, size, steps, offset, source); the line of live bytes, the top of the slab,
/// the lower bound where it lies below, and the step of the peak. A buffer computed in place begins in the middle of the
/// step where the other ends.
///
/// # Panics
/// If the plan is not one of this dag.
pub fn svg(dag: &Dag, plan: &Plan, title: &str) -> String {
    let picture = Picture { dag, plan, x_scale: PLOT_WIDTH / dag.steps() as f64, y_scale: PLOT_HEIGHT / plan.height.max(1) as f64 };
    picture.draw(title)
}

struct Picture<'a> {
    dag: &'a Dag,
    plan: &'a Plan,
    /// Pixels per step and per byte.
    x_scale: f64,
    y_scale: f64,
}

/// A rectangle to draw.
struct Block<'a> {
    name: &'a str,
    kind: Kind,
    /// In steps; halves where buffers meet in place.
    start: f64,
    end: f64,
    offset: u64,
    bytes: u64,
    tooltip: String,
}

impl Picture<'_> {
    fn x(&self, step: f64) -> f64 {
        LEFT + step * self.x_scale
    }

    fn y(&self, byte: u64) -> f64 {
        TOP + PLOT_HEIGHT - byte as f64 * self.y_scale
    }

    fn draw(&self, title: &str) -> String {
        let blocks = self.blocks();
        let names = self.plan.order.len() <= NAMED_TASKS_MAX;
        let longest = self.dag.tasks.iter().map(|task| task.name.chars().count().min(TASK_NAME_MAX)).max().unwrap_or(0);
        let below = if names { 34.0 + longest as f64 * LABEL * CHARACTER * 0.9 } else { 50.0 };
        let height = TOP + PLOT_HEIGHT + below;
        let mut out = String::new();
        let _ = writeln!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height:.0}\" viewBox=\"0 0 {WIDTH} {height:.0}\">\
             <style>{STYLE}</style>\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
             <text class=\"title\" x=\"{LEFT}\" y=\"26\">{}</text>\n<text class=\"sub\" x=\"{LEFT}\" y=\"46\">slab {} · {} tasks</text>",
            escaped(title),
            escaped(&Slab(self.plan).to_string()),
            self.dag.tasks.len(),
        );
        self.legend(&mut out, &blocks);
        self.grid(&mut out);
        blocks.iter().for_each(|block| self.block(&mut out, block));
        self.lines(&mut out);
        self.steps(&mut out, names);
        out + "</svg>\n"
    }

    fn blocks(&self) -> Vec<Block<'_>> {
        let (dag, plan) = (self.dag, self.plan);
        let (mut begins_late, mut ends_early) = (vec![false; dag.buffers.len()], vec![false; dag.buffers.len()]);
        for pair in &plan.reused {
            begins_late[pair.to.index()] = true;
            ends_early[pair.from.index()] = true;
        }
        let half = |yes: bool| if yes { 0.5 } else { 0.0 };
        let mut blocks = Vec::new();
        for (i, (buffer, live)) in dag.buffers.iter().zip(&plan.lifetimes).enumerate() {
            if live.is_empty() || buffer.bytes == 0 {
                continue;
            }
            let mut tooltip = format!("{} · {}\n{} = {} bytes", buffer.name, buffer.kind.label(), Bytes(buffer.bytes), buffer.bytes);
            let _ = write!(tooltip, "\nsteps {} to {} · offset {}", live.start, live.end - 1, plan.offsets[i]);
            if begins_late[i] {
                tooltip += "\ncomputed in place";
            }
            if !buffer.source.is_empty() {
                let _ = write!(tooltip, "\n{}", buffer.source);
            }
            blocks.push(Block {
                name: &buffer.name,
                kind: buffer.kind,
                start: live.start as f64 + half(begins_late[i]),
                end: live.end as f64 - half(ends_early[i]),
                offset: plan.offsets[i],
                bytes: buffer.bytes,
                tooltip,
            });
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
                blocks.push(Block { name: &task.name, kind: Kind::Workspace, start, end, offset, bytes: task.workspace, tooltip });
            }
        }
        blocks
    }

    /// The kinds that appear, and the lines.
    fn legend(&self, out: &mut String, blocks: &[Block<'_>]) {
        let mut x = LEFT;
        for kind in Kind::ALL.into_iter().filter(|&kind| blocks.iter().any(|block| block.kind == kind)) {
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
        for (class, label) in [("live", "live bytes"), ("slab", "slab")].into_iter().chain(bound) {
            let _ = writeln!(
                out,
                "<line class=\"{class}\" x1=\"{x:.1}\" x2=\"{:.1}\" y1=\"64.5\" y2=\"64.5\"/><text x=\"{:.1}\" y=\"68\">{label}</text>",
                x + 20.0,
                x + 25.0,
            );
            x += 25.0 + text_width(label, LABEL) + 18.0;
        }
    }

    /// Bytes: a power of two between two lines, eight lines or fewer; and the peak's column.
    fn grid(&self, out: &mut String) {
        let (step, _) = peak(self.dag, self.plan);
        let _ = writeln!(
            out,
            "<rect class=\"peak\" x=\"{:.2}\" y=\"{TOP}\" width=\"{:.2}\" height=\"{PLOT_HEIGHT}\"/>",
            self.x(step as f64),
            self.x_scale.max(1.0),
        );
        let distance = (self.plan.height / 8).max(1).next_power_of_two();
        let mut byte = 0;
        while byte <= self.plan.height {
            let y = self.y(byte);
            let label = Bytes(byte).to_string().replace(".0 ", " ");
            let _ = writeln!(
                out,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/><text class=\"axis\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
                LEFT + PLOT_WIDTH,
                LEFT - 8.0,
                y + 3.5,
            );
            let Some(next) = byte.checked_add(distance) else { break };
            byte = next;
        }
    }

    fn block(&self, out: &mut String, block: &Block<'_>) {
        let (x, width) = (self.x(block.start), (block.end - block.start) * self.x_scale);
        let (y, height) = (self.y(block.offset + block.bytes), block.bytes as f64 * self.y_scale);
        let (fill, stroke) = colours(block.kind);
        // Outlines must not swallow thin rectangles.
        let outline = (width.min(height) / 6.0).clamp(0.05, 0.8);
        let _ = write!(
            out,
            "<rect class=\"b\" x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\" fill=\"{fill}\" stroke=\"{stroke}\" stroke-width=\"{outline:.2}\"><title>{}</title></rect>",
            escaped(&block.tooltip),
        );
        if let Some(name) = fitted(block.name, width - 6.0, LABEL).filter(|_| height >= LABEL + 2.0) {
            let size = Bytes(block.bytes).to_string();
            let two_lines = height >= 28.0 && text_width(&size, LABEL - 1.0) <= width - 6.0;
            let baseline = y + height / 2.0 + if two_lines { -2.0 } else { 3.5 };
            let x = x + width / 2.0;
            let _ = write!(
                out,
                "<text x=\"{x:.1}\" y=\"{baseline:.1}\" text-anchor=\"middle\" pointer-events=\"none\">{}</text>",
                escaped(&name)
            );
            if two_lines {
                let y = baseline + 12.0;
                let _ = write!(
                    out,
                    "<text class=\"size\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\" pointer-events=\"none\">{size}</text>"
                );
            }
        }
        out.push('\n');
    }

    /// Live bytes, slab and lower bound.
    fn lines(&self, out: &mut String) {
        let mut path = String::new();
        for (step, &bytes) in live_bytes(self.dag, self.plan).iter().enumerate() {
            let command = if step == 0 { 'M' } else { 'L' };
            let (y, right) = (self.y(bytes), self.x(step as f64 + 1.0));
            let _ = write!(path, "{command}{:.2} {y:.2}H{right:.2}", self.x(step as f64));
        }
        let right = LEFT + PLOT_WIDTH;
        let thickness = (self.x_scale / 4.0).clamp(0.4, 1.2);
        let _ = writeln!(
            out,
            "<rect class=\"frame\" x=\"{LEFT}\" y=\"{TOP}\" width=\"{PLOT_WIDTH}\" height=\"{PLOT_HEIGHT}\"/>\n<path class=\"live\" stroke-width=\"{thickness:.2}\" pointer-events=\"none\" d=\"{path}\"/>\n\
             <line class=\"slab\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{TOP}\" y2=\"{TOP}\"/>\n\
             <text class=\"red\" x=\"{right}\" y=\"{:.1}\" text-anchor=\"end\">slab {}</text>",
            TOP - 5.0,
            Bytes(self.plan.height),
        );
        if self.plan.lower_bound < self.plan.height {
            let y = self.y(self.plan.lower_bound);
            let _ = writeln!(out, "<line class=\"bound\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>");
        }
    }

    /// The axis: step numbers, task names where there is room for them, and a tooltip per step.
    fn steps(&self, out: &mut String, names: bool) {
        let bottom = TOP + PLOT_HEIGHT;
        let peak = peak(self.dag, self.plan).0;
        let every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].into_iter().find(|n| self.dag.steps() / n <= 32);
        let every = every.unwrap_or_else(|| (self.dag.steps() / 32).next_power_of_two());
        let _ = writeln!(out, "<text class=\"axis\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">step</text>", LEFT - 8.0, bottom + 13.0);
        for (step, &id) in self.plan.order.iter().enumerate() {
            let (x, middle) = (self.x(step as f64), self.x(step as f64 + 0.5));
            let name = self.dag.task_name(id);
            let class = if step == peak { "red" } else { "axis" };
            let _ = write!(
                out,
                "<rect x=\"{x:.2}\" y=\"{bottom}\" width=\"{:.2}\" height=\"16\" fill=\"#fff\" fill-opacity=\"0\"><title>step {step} · {}</title></rect>",
                self.x_scale,
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
            let (x, y) = (self.x(peak as f64 + 0.5), bottom + 30.0);
            let name = self.plan.order.get(peak).map_or("", |&task| self.dag.task_name(task));
            let anchor = if x > WIDTH / 2.0 { "end" } else { "start" };
            let _ = writeln!(
                out,
                "<text class=\"red\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">peak: step {peak} {}</text>",
                escaped(name)
            );
        }
    }
}

fn text_width(text: &str, size: f64) -> f64 {
    text.chars().count() as f64 * size * CHARACTER
}

/// The text, shortened to a number of characters.
fn shortened(text: &str, characters: usize) -> String {
    if text.chars().count() <= characters {
        return text.into();
    }
    text.chars().take(characters.saturating_sub(1)).chain(['…']).collect()
}

/// As much of the text as fits a width, if that is enough to recognise it.
fn fitted(text: &str, width: f64, size: f64) -> Option<String> {
    const RECOGNISABLE: usize = 4;
    let characters = (width / (size * CHARACTER)).max(0.0) as usize;
    (characters >= RECOGNISABLE.min(text.chars().count())).then(|| shortened(text, characters))
}

/// Text as XML content or attribute; characters that XML cannot hold become U+FFFD.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&apos;",
            '\t' | '\n' => out.push(c),
            '\0'..='\u{1f}' | '\u{fffe}' | '\u{ffff}' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}
