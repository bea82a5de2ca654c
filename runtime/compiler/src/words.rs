//! Words of messages: counts, lists of names, and suggestions for a misspelt name.

/// A number with its noun: `1 input`, `2 inputs`.
pub fn count(n: usize, noun: &str) -> String {
    match noun.strip_suffix("is").filter(|_| n != 1) {
        Some(stem) => format!("{n} {stem}es"),
        None => format!("{n} {noun}{}", if n == 1 { "" } else { "s" }),
    }
}

/// Names in quotation marks, the first few of many: `"x" and "y"`, `"a", "b" and 7 more`.
pub fn list<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    const SHOWN: usize = 8;
    let all: Vec<String> = names.into_iter().map(|name| format!("{name:?}")).collect();
    match &all[..] {
        [] => "none".into(),
        [only] => only.clone(),
        [some @ .., last] if all.len() <= SHOWN => format!("{} and {last}", some.join(", ")),
        _ => format!("{} and {} more", all[..SHOWN].join(", "), all.len() - SHOWN),
    }
}

/// The known names that a misspelt one likely means, the nearest first, three at most: the fewest
/// letters to insert, remove, replace or swap, or the same last part.
fn nearest<'a>(wanted: &str, known: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let most = (wanted.chars().count() / 3).max(1);
    let last = |name: &str| name.rsplit('.').next().unwrap_or_default().to_lowercase();
    let tail = last(wanted);
    let mut near: Vec<(usize, &str)> = known
        .into_iter()
        .filter_map(|name| {
            let distance = strsim::osa_distance(&wanted.to_lowercase(), &name.to_lowercase());
            let same_tail = !tail.is_empty() && last(name) == tail && tail != wanted.to_lowercase();
            (distance <= most
                || (same_tail && distance <= 2 * most)
                || last(name) == wanted.to_lowercase())
            .then_some((distance, name))
        })
        .collect();
    near.sort_by(|a, b| a.0.cmp(&b.0).then_with(|| a.1.cmp(b.1)));
    near.dedup();
    near.into_iter().map(|(_, name)| name).take(3).collect()
}

/// The suffix of an error that lists all names: `; did you mean "x"?`, or nothing if none is near.
pub fn meant<'a>(wanted: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let near: Vec<String> = nearest(wanted, known)
        .into_iter()
        .map(|name| format!("{name:?}"))
        .collect();
    if near.is_empty() {
        String::new()
    } else {
        format!("; did you mean {}?", near.join(" or "))
    }
}

/// The suffix of an error about names too many to list: those that may be meant, or if none is
/// near, some of the known ones.
///
/// `wanted` is the name written, `plural` the kind of the known ones (`weights`).
pub fn instead<'a>(
    wanted: &str,
    plural: &str,
    known: impl IntoIterator<Item = &'a str> + Clone,
) -> String {
    match meant(wanted, known.clone()) {
        near if !near.is_empty() => near,
        _ if known.clone().into_iter().next().is_none() => format!("; there are no {plural}"),
        _ => format!("; the {plural} are {}", list(known)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_agree_with_their_nouns() {
        assert_eq!(
            [0, 1, 2].map(|n| count(n, "input")),
            ["0 inputs", "1 input", "2 inputs"]
        );
        assert_eq!(
            [0, 1, 2].map(|n| count(n, "axis")),
            ["0 axes", "1 axis", "2 axes"]
        );
    }

    #[test]
    fn lists_are_sentences_and_end() {
        assert_eq!(list([]), "none");
        assert_eq!(list(["x"]), "\"x\"");
        assert_eq!(list(["x", "y", "z"]), "\"x\", \"y\" and \"z\"");
        let many: Vec<String> = (0..20).map(|i| i.to_string()).collect();
        assert!(list(many.iter().map(String::as_str)).ends_with("\"7\" and 12 more"));
    }

    #[test]
    fn a_misspelt_name_finds_the_one_that_was_meant() {
        let known = ["head.weight", "head.bias", "body.weight", "tail"];
        assert_eq!(nearest("head.wieght", known), ["head.weight"]);
        assert_eq!(nearest("heed.weight", known)[0], "head.weight");
        assert_eq!(nearest("Head.Bias", known), ["head.bias"]);
        assert_eq!(nearest("bias", known), ["head.bias"]);
        assert_eq!(nearest("tial", known), ["tail"]);
        assert!(nearest("optimizer", known).is_empty());
        assert_eq!(instead("x", "weights", []), "; there are no weights");
        assert_eq!(
            instead("momentum", "weights", ["a", "b"]),
            "; the weights are \"a\" and \"b\""
        );
        assert_eq!(
            instead("tial", "weights", known),
            "; did you mean \"tail\"?"
        );
    }
}
