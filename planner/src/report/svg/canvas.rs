//! The shared parts of all pictures: a plot of time × bytes with its axis of bytes, rectangles and
//! lines.

use crate::bytes::Bytes;
use std::fmt::Write;

pub(super) const WIDTH: f64 = 1240.0;
pub(super) const LEFT: f64 = 92.0;
const RIGHT: f64 = 24.0;
pub(super) const TOP: f64 = 86.0;
pub(super) const PLOT_HEIGHT: f64 = 520.0;
pub(super) const PLOT_WIDTH: f64 = WIDTH - LEFT - RIGHT;
/// The width of a character of the monospaced font, relative to its size.
pub(super) const CHARACTER: f64 = 0.602;
pub(super) const LABEL: f64 = 10.0;

const STYLE: &str = "\
text{font-family:ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;font-size:10px;fill:#24292f}\
.title{font-size:16px;font-weight:bold}.sub{font-size:11.5px;fill:#57606a}.axis{fill:#57606a}.size{fill:#57606a;font-size:9px}\
.grid{stroke:#e7eaee;stroke-width:1}.frame{stroke:#8c959f;stroke-width:1;fill:none}\
.live{stroke:#24292f;fill:none;stroke-linejoin:round;opacity:.75}\
.slab{stroke:#cf222e;stroke-width:1.4}.bound{stroke:#cf222e;stroke-width:1;stroke-dasharray:5 4}.peak{fill:#cf222e;fill-opacity:.07}\
.red{fill:#cf222e}.b:hover{stroke:#000;stroke-width:1.5}";

/// A fill and an outline.
pub(in crate::report) type Colours = (&'static str, &'static str);

/// The plot: pixels per step and per byte.
pub(super) struct Canvas {
    pub(super) x_scale: f64,
    pub(super) y_scale: f64,
    /// Bytes from the bottom to the top.
    pub(super) height: u64,
}

/// A rectangle to draw.
pub(super) struct Rectangle<'a> {
    pub(super) name: &'a str,
    pub(super) colours: Colours,
    /// In steps from the left; halves where buffers meet in place.
    pub(super) start: f64,
    pub(super) end: f64,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) tooltip: String,
}

impl Canvas {
    /// A plot of this many steps and bytes.
    pub(super) fn new(steps: f64, height: u64) -> Self {
        Canvas {
            x_scale: PLOT_WIDTH / steps,
            y_scale: PLOT_HEIGHT / height.max(1) as f64,
            height,
        }
    }

    pub(super) fn x(&self, step: f64) -> f64 {
        LEFT + step * self.x_scale
    }

    pub(super) fn y(&self, byte: u64) -> f64 {
        TOP + PLOT_HEIGHT - byte as f64 * self.y_scale
    }

    /// The beginning of a picture with this much space below the plot: background, title and
    /// subtitle.
    pub(super) fn open(&self, title: &str, subtitle: &str, below: f64) -> String {
        let height = TOP + PLOT_HEIGHT + below;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height:.0}\" viewBox=\"0 0 {WIDTH} {height:.0}\">\
             <style>{STYLE}</style>\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
             <text class=\"title\" x=\"{LEFT}\" y=\"26\">{}</text>\n<text class=\"sub\" x=\"{LEFT}\" y=\"46\">{}</text>\n",
            escaped(title),
            escaped(subtitle),
        )
    }

    /// Names of lines from `x` on, with an example of each.
    pub(super) fn line_legend(
        &self,
        out: &mut String,
        mut x: f64,
        lines: impl IntoIterator<Item = (&'static str, &'static str)>,
    ) {
        for (class, label) in lines {
            let _ = writeln!(
                out,
                "<line class=\"{class}\" x1=\"{x:.1}\" x2=\"{:.1}\" y1=\"64.5\" y2=\"64.5\"/><text x=\"{:.1}\" y=\"68\">{label}</text>",
                x + 20.0,
                x + 25.0,
            );
            x += 25.0 + text_width(label, LABEL) + 18.0;
        }
    }

    /// Bytes: a power of two between two lines, eight lines or fewer.
    pub(super) fn grid(&self, out: &mut String) {
        let distance = (self.height / 8)
            .max(1)
            .checked_next_power_of_two()
            .unwrap_or(1 << 63);
        let mut byte = 0;
        while byte <= self.height {
            let y = self.y(byte);
            let label = Bytes(byte).to_string().replace(".0 ", " ");
            let _ = writeln!(
                out,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/><text class=\"axis\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
                LEFT + PLOT_WIDTH,
                LEFT - 8.0,
                y + 3.5,
            );
            let Some(next) = byte.checked_add(distance) else {
                break;
            };
            byte = next;
        }
    }

    /// Left, top, width and height.
    pub(super) fn place(&self, rectangle: &Rectangle<'_>) -> (f64, f64, f64, f64) {
        let (x, width) = (
            self.x(rectangle.start),
            (rectangle.end - rectangle.start) * self.x_scale,
        );
        (
            x,
            self.y(rectangle.offset + rectangle.bytes),
            width,
            rectangle.bytes as f64 * self.y_scale,
        )
    }

    pub(super) fn rectangle(&self, out: &mut String, rectangle: &Rectangle<'_>) {
        let (x, y, width, height) = self.place(rectangle);
        let (fill, stroke) = rectangle.colours;
        // Outlines must not hide thin rectangles.
        let outline = (width.min(height) / 6.0).clamp(0.05, 0.8);
        let _ = write!(
            out,
            "<rect class=\"b\" x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\" fill=\"{fill}\" stroke=\"{stroke}\" stroke-width=\"{outline:.2}\"><title>{}</title></rect>",
            escaped(&rectangle.tooltip),
        );
        if let Some(name) =
            fitted(rectangle.name, width - 6.0, LABEL).filter(|_| height >= LABEL + 2.0)
        {
            let size = Bytes(rectangle.bytes).to_string();
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

    /// The frame, the line of live bytes (given as a path), the top, and the lower bound if it is
    /// smaller.
    pub(super) fn lines(&self, out: &mut String, path: &str, name: &str, lower_bound: u64) {
        let right = LEFT + PLOT_WIDTH;
        let thickness = (self.x_scale / 4.0).clamp(0.4, 1.2);
        let _ = writeln!(
            out,
            "<rect class=\"frame\" x=\"{LEFT}\" y=\"{TOP}\" width=\"{PLOT_WIDTH}\" height=\"{PLOT_HEIGHT}\"/>\n<path class=\"live\" stroke-width=\"{thickness:.2}\" pointer-events=\"none\" d=\"{path}\"/>\n\
             <line class=\"slab\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{TOP}\" y2=\"{TOP}\"/>\n\
             <text class=\"red\" x=\"{right}\" y=\"{:.1}\" text-anchor=\"end\">{name} {}</text>",
            TOP - 5.0,
            Bytes(self.height),
        );
        if lower_bound < self.height {
            let y = self.y(lower_bound);
            let _ = writeln!(
                out,
                "<line class=\"bound\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>"
            );
        }
    }
}

pub(super) fn text_width(text: &str, size: f64) -> f64 {
    text.chars().count() as f64 * size * CHARACTER
}

/// The text, shortened to a number of characters.
pub(super) fn shortened(text: &str, characters: usize) -> String {
    if text.chars().count() <= characters {
        return text.into();
    }
    text.chars()
        .take(characters.saturating_sub(1))
        .chain(['…'])
        .collect()
}

/// As much of the text as fits a width, if that is enough to recognise it.
fn fitted(text: &str, width: f64, size: f64) -> Option<String> {
    const RECOGNISABLE: usize = 4;
    let characters = (width / (size * CHARACTER)).max(0.0) as usize;
    (characters >= RECOGNISABLE.min(text.chars().count())).then(|| shortened(text, characters))
}

/// Text as XML content or attribute; characters that XML cannot hold become U+FFFD.
pub(in crate::report) fn escaped(text: &str) -> String {
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
