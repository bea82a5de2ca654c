//! A packing as a picture: every item is a rectangle of time × bytes, or several if it has gaps.

use super::canvas::{
    Canvas, Colours, LEFT, PLOT_HEIGHT, PLOT_WIDTH, Rectangle, TOP, WIDTH, escaped,
};
use crate::bytes::Bytes;
use slabwise_packer::csv::Table;
use slabwise_packer::{Packing, Problem};
use std::collections::BTreeMap;
use std::fmt::Write;

/// The colours of items, in turn.
const COLOURS: [Colours; 6] = [
    ("#b7d7f0", "#5b93bf"),
    ("#bfe3bd", "#65a563"),
    ("#fbd0a4", "#cf8a3d"),
    ("#cfc3ea", "#8471b5"),
    ("#f2b8cf", "#bf5f88"),
    ("#ede3c4", "#b0a067"),
];
/// The colours of items at fixed offsets.
const FIXED: Colours = ("#dfe1e4", "#9097a0");

/// The most rectangles that are all separate elements, whatever their size.
const ELEMENTS_MAX: usize = 2_000;
/// With more, rectangles below this many pixels in either direction are merged into one shape per
/// colour.
const SMALL: f64 = 2.0;

/// Draws a packing: time to the right, bytes upwards, the spaces above each other, each item a
/// rectangle, named if the name fits, with a tooltip (id, size, life, offset); the line of live
/// bytes, the height, and the lower bound if it is smaller. Among thousands of items, very small
/// ones have no tooltip, so that the picture renders fast.
///
/// # Panics
/// If the packing is not one of the table's problem.
pub fn packing_svg(table: &Table, packing: &Packing, title: &str) -> String {
    let problem = &table.problem;
    let rects = problem.rects();
    let first = rects.iter().map(|rect| rect.start).min().unwrap_or(0);
    let last = rects.iter().map(|rect| rect.end).max().unwrap_or(1);
    let canvas = Canvas::new((last - first) as f64, packing.height);
    let (height, bound) = (Bytes(packing.height), Bytes(packing.lower_bound));
    let subtitle = format!(
        "{} items · height {height} · lower bound {bound} · {}",
        problem.items.len(),
        packing.method
    );
    let mut out = canvas.open(title, &subtitle, 50.0);
    let below = packing.lower_bound < packing.height;
    let lines = [("live", "live bytes"), ("slab", "height")]
        .into_iter()
        .chain(below.then_some(("bound", "lower bound")));
    canvas.line_legend(&mut out, LEFT, lines);
    canvas.grid(&mut out);

    // Where each space begins.
    let bottoms: Vec<u64> = packing
        .spaces
        .iter()
        .scan(0, |next, space| {
            Some(std::mem::replace(next, *next + space.height))
        })
        .collect();
    let space_of = problem.space_of();
    let mut fixed = vec![false; problem.items.len()];
    problem.fixed.iter().for_each(|at| fixed[at.item] = true);
    let mut small: BTreeMap<Colours, String> = BTreeMap::new();
    for rect in &rects {
        let (item, offset) = (rect.item, packing.offsets[rect.item]);
        let life = problem.items[item].life;
        let rectangle = Rectangle {
            name: table.id(item),
            colours: if fixed[item] {
                FIXED
            } else {
                COLOURS[item % COLOURS.len()]
            },
            start: (rect.start - first) as f64,
            end: (rect.end - first) as f64,
            offset: bottoms[space_of[item]] + offset + rect.low,
            bytes: rect.high - rect.low,
            tooltip: String::new(),
        };
        let (x, y, width, height) = canvas.place(&rectangle);
        if rects.len() > ELEMENTS_MAX && (width < SMALL || height < SMALL) {
            let path = small.entry(rectangle.colours).or_default();
            let _ = write!(
                path,
                "M{x:.1} {y:.1}h{:.1}v{:.1}h-{:.1}z",
                width.max(0.1),
                height.max(0.1),
                width.max(0.1)
            );
            continue;
        }
        let size = problem.items[item].size;
        let tooltip = format!(
            "{}\n{} = {size} bytes\nfrom {} to {} · offset {offset}",
            rectangle.name,
            Bytes(size),
            life.start,
            life.end
        );
        canvas.rectangle(
            &mut out,
            &Rectangle {
                tooltip,
                ..rectangle
            },
        );
    }
    for ((fill, _), path) in small {
        let _ = writeln!(out, "<path fill=\"{fill}\" d=\"{path}\"/>");
    }
    for (space, &bottom) in bottoms.iter().enumerate().skip(1) {
        let (y, name) = (
            canvas.y(bottom),
            table.spaces.get(space).map_or("", String::as_str),
        );
        let right = LEFT + PLOT_WIDTH;
        let _ = writeln!(
            out,
            "<line class=\"slab\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/><text class=\"red\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            LEFT + 4.0,
            y - 4.0,
            escaped(name)
        );
    }
    canvas.lines(
        &mut out,
        &live(&canvas, problem, packing, first, last),
        "height",
        packing.lower_bound,
    );
    axis(&mut out, &canvas, first, last);
    out + "</svg>\n"
}

/// The line of live bytes: for each pixel, the maximum within it. Aliases and pairs computed in
/// place count once.
fn live(canvas: &Canvas, problem: &Problem, packing: &Packing, first: u64, last: u64) -> String {
    let mut changes: Vec<(u64, i128)> = Vec::new();
    let mut load =
        |start: u64, end: u64, bytes: i128| changes.extend([(start, bytes), (end, -bytes)]);
    problem
        .live()
        .into_iter()
        .for_each(|(life, bytes)| load(life.start, life.end, i128::from(bytes)));
    for pair in &packing.in_place {
        let (giver, taker) = (problem.items[pair.from], problem.items[pair.to]);
        load(
            taker.life.start,
            giver.life.end,
            -i128::from(giver.size.min(taker.size)),
        );
    }
    changes.sort_unstable();
    let pixels = PLOT_WIDTH as usize;
    let pixel = |time: u64| {
        (((time - first) as f64 / (last - first) as f64 * pixels as f64) as usize).min(pixels - 1)
    };
    let mut most = vec![0i128; pixels];
    let mut sum = 0;
    for (at, &(time, change)) in changes.iter().enumerate() {
        sum += change;
        let until = changes.get(at + 1).map_or(last, |&(next, _)| next);
        if until > time {
            let (from, to) = (pixel(time), pixel(until - 1));
            most[from..=to]
                .iter_mut()
                .for_each(|most| *most = sum.max(*most));
        }
    }
    let mut path = String::new();
    for (at, &bytes) in most.iter().enumerate() {
        // Only the ends of a run of equal values are drawn.
        if at > 0 && most.get(at + 1) == Some(&bytes) && most[at - 1] == bytes {
            continue;
        }
        let (x, y) = (
            LEFT + at as f64,
            canvas.y(u64::try_from(bytes).unwrap_or(u64::MAX)),
        );
        let _ = write!(
            path,
            "{}{x:.0} {y:.1}H{:.0}",
            if at == 0 { 'M' } else { 'L' },
            x + 1.0
        );
    }
    path
}

/// About eight times below the plot.
fn axis(out: &mut String, canvas: &Canvas, first: u64, last: u64) {
    let bottom = TOP + PLOT_HEIGHT + 13.0;
    let _ = writeln!(
        out,
        "<text class=\"axis\" x=\"{:.1}\" y=\"{bottom:.1}\" text-anchor=\"end\">time</text>",
        LEFT - 8.0
    );
    let distance = ((last - first) / 8).max(1);
    for tick in 0..=8 {
        let Some(time) = first
            .checked_add(tick * distance)
            .filter(|&time| time <= last)
        else {
            break;
        };
        let x = canvas.x((time - first) as f64).min(WIDTH);
        let _ = writeln!(
            out,
            "<text class=\"axis\" x=\"{x:.1}\" y=\"{bottom:.1}\" text-anchor=\"middle\">{time}</text>"
        );
    }
}
