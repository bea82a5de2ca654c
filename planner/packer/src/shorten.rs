//! Texts for people: shortened and escaped in messages, aligned in tables.

/// The most characters of a name or a field in a message.
const BRIEF: usize = 48;

/// A name or a field of an input file for a message: [`shortened`] to 48 characters.
pub fn brief(text: &str) -> String {
    shortened(text, BRIEF)
}

/// A text of at most `most` characters. A longer one keeps its beginning and its end, with `…` in
/// between. Control characters and other invisible ones are escaped, so that no text can hide or
/// alter the message that contains it.
pub fn shortened(text: &str, most: usize) -> String {
    let (whole, is_all) = taken(text.chars(), most);
    if is_all {
        return whole.concat();
    }
    let tail = most / 3;
    let (head, _) = taken(text.chars(), most.saturating_sub(tail + 1));
    let (mut end, _) = taken(text.chars().rev(), tail);
    end.reverse();
    format!("{}…{}", head.concat(), end.concat())
}

/// As many of these characters as fit, escaped, and whether all do.
fn taken(characters: impl Iterator<Item = char>, most: usize) -> (Vec<String>, bool) {
    let (mut pieces, mut width) = (Vec::new(), 0);
    for c in characters {
        let piece = match c {
            '"' | '\'' | '\\' => c.to_string(),
            _ => c.escape_debug().to_string(),
        };
        width += piece.chars().count();
        if width > most {
            return (pieces, false);
        }
        pieces.push(piece);
    }
    (pieces, true)
}

/// The widest column that is filled up with spaces: cells that quote a file's names are shortened
/// to less.
const WIDTH_MAX: usize = 120;

/// The width of the widest of these cells, in characters, at most 120. (The formatter takes no more
/// than 65,535, and panics.)
pub fn widest<'a>(cells: impl Iterator<Item = &'a str>) -> usize {
    cells
        .map(|cell| cell.chars().count())
        .max()
        .unwrap_or(0)
        .min(WIDTH_MAX)
}

/// Rows under a head with aligned columns: the first `left` at the left, the others at the right.
pub fn table(rows: &[Vec<String>], left: usize) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        widest(
            rows.iter()
                .filter_map(|row| row.get(column))
                .map(String::as_str),
        )
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let show = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).enumerate();
        let cells = cells.map(|(i, (cell, &w))| {
            if i < left {
                format!("{cell:<w$}")
            } else {
                format!("{cell:>w$}")
            }
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_string()
    };
    rows.iter().map(show).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_texts_stay_and_long_ones_keep_both_ends() {
        assert_eq!(brief("a \"quoted\" näme"), "a \"quoted\" näme");
        assert_eq!(shortened("0123456789abcdef", 10), "012345…def");
        for most in 0..40 {
            let cut = shortened(&"x".repeat(1000), most);
            assert!(cut.chars().count() <= most.max(1), "{cut}");
        }
        assert_eq!(brief(&"[".repeat(2_000_000)).chars().count(), BRIEF);
    }

    #[test]
    fn nothing_that_cannot_be_seen_is_left() {
        assert_eq!(
            brief("a\0\u{1b}[31m\n\u{202e}b"),
            "a\\0\\u{1b}[31m\\n\\u{202e}b"
        );
        let zeros = brief(&"\0".repeat(1000));
        assert!(
            zeros.chars().count() <= BRIEF && !zeros.contains('\0'),
            "{zeros}"
        );
    }

    #[test]
    fn columns_are_aligned() {
        let rows = [
            vec!["".into(), "a".into()],
            vec!["total".into(), "1,024".into()],
            vec!["≤".into(), "7".into()],
        ];
        assert_eq!(table(&rows, 1), "           a\ntotal  1,024\n≤          7");
        assert_eq!(table(&rows, 2), "       a\ntotal  1,024\n≤      7");
        // More than the formatter pads to.
        let long = "x".repeat(70_000);
        assert!(table(&[vec![long, "1".into()]], 1).ends_with("x  1"));
    }
}
