//! What commands print.

use std::io::Write;
use std::time::Instant;

use slabwise::{Error, Result};

/// Writes text and a line end to stdout. A reader that has gone away is an error like any other, not a panic.
pub fn line(text: impl std::fmt::Display) -> Result<()> {
    writeln!(std::io::stdout(), "{text}").map_err(|source| Error::Io { path: "<stdout>".into(), source })
}

/// Times of repeated work, in milliseconds.
#[derive(Default)]
pub struct Times(Vec<f64>);

impl Times {
    /// Does `work` and keeps how long it took.
    pub fn time<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        self.0.push(start.elapsed().as_secs_f64() * 1e3);
        result
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The middle one; of an even number, the mean of the two in the middle.
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let half = sorted.len() / 2;
        match sorted.len() {
            0 => f64::NAN,
            n if n % 2 == 1 => sorted[half],
            _ => (sorted[half - 1] + sorted[half]) / 2.0,
        }
    }

    /// The shortest.
    pub fn min(&self) -> f64 {
        self.0.iter().copied().fold(f64::INFINITY, f64::min)
    }
}

/// Rows under a head, columns aligned: the first to the left, the others to the right.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let show = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).enumerate();
        let cells = cells.map(|(i, (cell, &w))| if i == 0 { format!("{cell:<w$}") } else { format!("{cell:>w$}") });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_string()
    };
    rows.iter().map(show).collect::<Vec<_>>().join("\n")
}

/// Names and values, one pair a line, the values under each other.
pub fn pairs<N: AsRef<str>>(pairs: &[(N, String)]) -> Result<()> {
    let width = pairs.iter().map(|(name, _)| name.as_ref().len()).max().unwrap_or(0);
    pairs.iter().try_for_each(|(name, value)| line(format_args!("{:<width$}  {value}", name.as_ref())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_minima() {
        assert!(Times::default().median().is_nan());
        assert_eq!(Times(vec![3.0, 1.0, 2.0]).median(), 2.0);
        let even = Times(vec![4.0, 1.0, 2.0, 8.0]);
        assert_eq!((even.median(), even.min(), even.count()), (3.0, 1.0, 4));
    }

    #[test]
    fn columns_are_aligned() {
        let rows = [vec!["".into(), "a".into()], vec!["total".into(), "1,024".into()], vec!["≤".into(), "7".into()]];
        assert_eq!(table(&rows), "           a\ntotal  1,024\n≤          7");
    }
}
