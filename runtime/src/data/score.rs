//! Scores of generated sequences beside references.

use std::collections::HashMap;
use std::hash::Hash;

/// The fewest insertions, deletions and substitutions that turn one sequence into another
/// (Levenshtein 1966).
pub fn edit_distance<T: PartialEq>(from: &[T], to: &[T]) -> usize {
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.iter().enumerate() {
        let mut corner = row[0];
        row[0] = i + 1;
        for (j, b) in to.iter().enumerate() {
            let changed = corner + usize::from(a != b);
            corner = row[j + 1];
            row[j + 1] = changed.min(row[j].min(corner) + 1);
        }
    }
    row[to.len()]
}

/// The edits of all sequences by the length of their references: of words the word error rate, of
/// characters that of characters. Pairs are (found, reference). NaN without any reference.
///
/// ```
/// # use slabwise::data::error_rate;
/// let words = |text: &'static str| text.split(' ').collect::<Vec<_>>();
/// let pairs = [(words("the cat sat"), words("the cat sat down"))];
/// assert_eq!(error_rate(&pairs), 0.25);
/// ```
pub fn error_rate<T: PartialEq>(pairs: &[(Vec<T>, Vec<T>)]) -> f64 {
    let edits: usize = pairs
        .iter()
        .map(|(found, wanted)| edit_distance(found, wanted))
        .sum();
    let length: usize = pairs.iter().map(|(_, wanted)| wanted.len()).sum();
    edits as f64 / length as f64
}

/// BLEU of a corpus with one reference for each sequence (Papineni et al. 2002): the geometric mean
/// of the precisions of runs of 1 to `longest` tokens (usually 4), times the brevity penalty, in
/// 0..=1. Pairs are (found, reference). Without smoothing: 0 if no run of some length is right.
pub fn bleu<T: Eq + Hash>(pairs: &[(Vec<T>, Vec<T>)], longest: usize) -> f64 {
    let mut logs = 0.0;
    for n in 1..=longest {
        let (mut right, mut all) = (0, 0);
        for (found, wanted) in pairs {
            let mut left: HashMap<&[T], usize> = HashMap::new();
            for run in wanted.windows(n) {
                *left.entry(run).or_default() += 1;
            }
            for run in found.windows(n) {
                all += 1;
                if let Some(count) = left.get_mut(run).filter(|count| **count > 0) {
                    *count -= 1;
                    right += 1;
                }
            }
        }
        if right == 0 {
            return 0.0;
        }
        logs += (f64::from(right) / f64::from(all)).ln();
    }
    let total = |of: fn(&(Vec<T>, Vec<T>)) -> usize| pairs.iter().map(of).sum::<usize>() as f64;
    let (found, wanted) = (
        total(|(found, _)| found.len()),
        total(|(_, wanted)| wanted.len()),
    );
    let penalty = if found < wanted {
        1.0 - wanted / found
    } else {
        0.0
    };
    (logs / longest.max(1) as f64 + penalty).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<&str> {
        text.split_whitespace().collect()
    }

    #[test]
    fn edits_are_the_fewest() {
        for (a, b, edits) in [
            ("kitten", "sitting", 3),
            ("", "abc", 3),
            ("abc", "", 3),
            ("flaw", "lawn", 2),
            ("same", "same", 0),
        ] {
            assert_eq!(
                edit_distance(a.as_bytes(), b.as_bytes()),
                edits,
                "{a} to {b}"
            );
        }
        assert!(error_rate::<u8>(&[]).is_nan());
    }

    #[test]
    fn bleu_is_the_mean_of_clipped_precisions() {
        let pairs = [
            (
                words("the cat is on the mat today"),
                words("the cat is on the red mat"),
            ),
            (words("a dog runs"), words("a dog runs fast")),
        ];
        // Runs right: 9 of 10, 6 of 8, 4 of 6, 2 of 4; brevity e^(1 − 11/10).
        let precisions = 0.9f64 * 0.75 * (4.0 / 6.0) * 0.5;
        let exact = precisions.powf(0.25) * (1.0f64 - 1.1).exp();
        assert!((bleu(&pairs, 4) - exact).abs() < 1e-12);
        assert_eq!(bleu(&[(words("a b c d"), words("a b c d"))], 4), 1.0);
        assert_eq!(bleu(&[(words("a b"), words("a b"))], 4), 0.0);
        // A word counts as often as the reference has it.
        let repeated = [(words("the the the the"), words("the cat is here"))];
        assert_eq!(bleu(&repeated, 1), 0.25);
    }
}
