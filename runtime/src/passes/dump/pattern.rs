//! Small regular expressions, for names of passes.

/// Alternatives between `|`, each a sequence of characters with `.`, `x*`, `^` and `$`.
///
/// After the matcher of Kernighan and Pike, *The Practice of Programming* (1999), section 9.2.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pattern(Vec<Vec<char>>);

impl Pattern {
    pub fn new(text: &str) -> Self {
        Pattern(text.split('|').map(|one| one.chars().collect()).collect())
    }

    /// Whether the pattern matches anywhere in a text.
    pub fn matches(&self, text: &str) -> bool {
        let text: Vec<char> = text.chars().collect();
        self.0.iter().any(|one| match one.split_first() {
            Some(('^', rest)) => here(rest, &text),
            _ => (0..=text.len()).any(|start| here(one, &text[start..])),
        })
    }
}

/// Whether a pattern matches at the beginning of a text.
fn here(pattern: &[char], text: &[char]) -> bool {
    let is = |expected: char, c: &char| expected == '.' || expected == *c;
    match pattern {
        [] => true,
        ['$'] => text.is_empty(),
        [repeated, '*', rest @ ..] => {
            let count = text.iter().take_while(|c| is(*repeated, c)).count();
            (0..=count).any(|count| here(rest, &text[count..]))
        }
        [first, rest @ ..] => match text.split_first() {
            Some((c, text)) => is(*first, c) && here(rest, text),
            None => false,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::Pattern;

    #[test]
    fn patterns_match_as_regular_expressions_do() {
        let matches = |pattern: &str, text: &str| Pattern::new(pattern).matches(text);
        assert!(matches("", "fuse") && matches("us", "fuse") && matches("fuse|lower", "lower"));
        assert!(!matches("^use", "fuse") && !matches("fuse$", "fuse-prologues"));
        assert!(matches("^fuse$", "fuse") && matches("^f.*e$", "fuse") && matches("f.s", "fuse"));
        assert!(!matches("x|y", "fuse") && matches("fx*u", "fuse") && !matches("a.*z", "a"));
    }
}
