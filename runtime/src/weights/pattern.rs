//! Patterns of tensors' names, with captures.

use std::fmt;

/// A pattern of dotted names: `{i}` captures one component or the rest of one, `{*rest}` captures
/// any number of whole components, none among them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pattern {
    text: String,
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    /// A component, with one capture at most.
    One {
        before: String,
        capture: Option<String>,
        after: String,
    },
    /// Any number of components.
    Rest(String),
}

/// The captured parts of a name, by the captures' names.
pub(super) type Captures<'n> = Vec<(String, &'n str)>;

impl Pattern {
    /// Reads a pattern; the error names its defect. A faulty pattern matches nothing.
    pub(super) fn parse(text: &str) -> (Pattern, Option<String>) {
        let mut fault = None;
        let mut say = |detail: &str| {
            fault.get_or_insert_with(|| format!("the pattern \"{text}\" {detail}"));
        };
        if text.is_empty() {
            say("is empty");
        }
        let mut parts = Vec::new();
        for component in text.split('.') {
            let Some((before, tail)) = component.split_once('{') else {
                if component.contains('}') {
                    say("has a `}` without its `{`");
                }
                parts.push(Part::One {
                    before: component.to_owned(),
                    capture: None,
                    after: String::new(),
                });
                continue;
            };
            let Some((capture, after)) = tail.split_once('}') else {
                say("has a `{` without its `}`");
                continue;
            };
            let (rest, name) = match capture.strip_prefix('*') {
                Some(name) => (true, name),
                None => (false, capture),
            };
            let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
            if name.is_empty() || !name.chars().all(is_name) {
                say("has a capture without a name: write {i} or {*rest}");
            }
            if after.contains(['{', '}']) {
                say("has two captures in one component");
            }
            if rest && !(before.is_empty() && after.is_empty()) {
                say(
                    "has a capture of several components that is not a component of its own: write `a.{*rest}.b`",
                );
            }
            parts.push(match rest {
                true => Part::Rest(name.to_owned()),
                false => Part::One {
                    before: before.to_owned(),
                    capture: Some(name.to_owned()),
                    after: after.to_owned(),
                },
            });
        }
        let rests = parts.iter().filter(|part| matches!(part, Part::Rest(_)));
        if rests.count() > 1 {
            say("has two captures of several components, of which it is unclear where one ends");
        }
        let pattern = Pattern {
            text: text.to_owned(),
            parts,
        };
        let mut names = pattern.captures();
        names.sort_unstable();
        if names.windows(2).any(|two| two[0] == two[1]) {
            say("has the same capture twice");
        }
        (pattern, fault)
    }

    /// The names of its captures, from left to right.
    pub(super) fn captures(&self) -> Vec<&str> {
        let name = |part| match part {
            &Part::One { ref capture, .. } => capture.as_deref(),
            Part::Rest(name) => Some(&**name),
        };
        self.parts.iter().filter_map(name).collect()
    }

    /// The captured parts of a name that it matches.
    pub(super) fn matches<'n>(&self, name: &'n str) -> Option<Captures<'n>> {
        let mut captures = Captures::new();
        let mut left = Some(name);
        let mut parts = self.parts.iter();
        while let Some(part) = parts.next() {
            match part {
                Part::One { .. } => {
                    let (component, tail) = match left?.split_once('.') {
                        Some((component, tail)) => (component, Some(tail)),
                        None => (left?, None),
                    };
                    part.capture(component, &mut captures)?;
                    left = tail;
                }
                Part::Rest(rest) => {
                    for part in parts.by_ref().rev() {
                        let (tail, component) = match left?.rsplit_once('.') {
                            Some((tail, component)) => (Some(tail), component),
                            None => (None, left?),
                        };
                        part.capture(component, &mut captures)?;
                        left = tail;
                    }
                    captures.push((rest.clone(), left.take().unwrap_or_default()));
                }
            }
        }
        left.is_none().then_some(captures)
    }

    /// The name of these captures; an empty capture of several components vanishes with its dot.
    pub(super) fn fill(&self, captures: &Captures<'_>) -> String {
        let of = |name: &str| {
            let found = captures.iter().find(|(known, _)| known == name);
            found.map_or("", |(_, value)| value)
        };
        let mut name = String::new();
        for part in &self.parts {
            let component = match part {
                Part::One {
                    before,
                    capture,
                    after,
                } => format!("{before}{}{after}", capture.as_deref().map_or("", of)),
                Part::Rest(rest) if of(rest).is_empty() => continue,
                Part::Rest(rest) => of(rest).to_owned(),
            };
            if !name.is_empty() {
                name.push('.');
            }
            name.push_str(&component);
        }
        name
    }

    /// The pattern with its captures numbered instead of named, so that equal patterns are equal.
    pub(super) fn anonymous(&self) -> String {
        let part = |part: &Part| match part {
            Part::One {
                before,
                capture,
                after,
            } => format!("{before}{}{after}", capture.as_ref().map_or("", |_| "{}")),
            Part::Rest(_) => "{*}".to_owned(),
        };
        let parts: Vec<String> = self.parts.iter().map(part).collect();
        parts.join(".")
    }
}

impl Part {
    /// Adds its capture of a component that it matches.
    fn capture<'n>(&self, component: &'n str, captures: &mut Captures<'n>) -> Option<()> {
        let Part::One {
            before,
            capture,
            after,
        } = self
        else {
            return None;
        };
        match capture {
            None => (component == before).then_some(()),
            Some(name) => {
                let inner = component.strip_prefix(&**before)?.strip_suffix(&**after)?;
                captures.push((name.clone(), inner));
                (!inner.is_empty()).then_some(())
            }
        }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(from: &str, name: &str, to: &str) -> Option<String> {
        let (from, fault) = Pattern::parse(from);
        assert_eq!(fault, None);
        let (to, fault) = Pattern::parse(to);
        assert_eq!(fault, None);
        from.matches(name).map(|captures| to.fill(&captures))
    }

    #[test]
    fn captures_are_moved_to_their_places() {
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(filled("h.{i}.w", "h.12.w", "x.{i}.y"), some("x.12.y"));
        assert_eq!(filled("h.{i}.w", "h.12.b", "x.{i}.y"), None);
        assert_eq!(filled("h.{i}.w", "h.1.2.w", "x.{i}.y"), None);
        assert_eq!(filled("layer{i}.w", "layer3.w", "l.{i}.w"), some("l.3.w"));
        assert_eq!(filled("layer{i}.w", "layer.w", "l.{i}.w"), None);
        assert_eq!(filled("a.{*r}", "a.b.c", "{*r}"), some("b.c"));
        assert_eq!(filled("a.{*r}", "a", "x.{*r}"), some("x"));
        assert_eq!(filled("a.{*r}", "ab.c", "x.{*r}"), None);
        assert_eq!(filled("{*p}.h.{i}.w", "h.0.w", "{*p}.g.{i}"), some("g.0"));
        assert_eq!(
            filled("{*p}.h.{i}.w", "m.n.h.0.w", "{*p}.g.{i}"),
            some("m.n.g.0")
        );
        assert_eq!(filled("{*p}.w", "w", "{*p}.v"), some("v"));
        assert_eq!(filled("{*all}", "any.name", "m.{*all}"), some("m.any.name"));
        assert_eq!(filled("w", "w", "v"), some("v"));
        assert_eq!(filled("w.x", "w", "v"), None);
    }

    #[test]
    fn faulty_patterns_are_named() {
        for (text, says) in [
            ("", "is empty"),
            ("a.{i", "without its `}`"),
            ("a.i}", "without its `{`"),
            ("a.{}", "without a name"),
            ("a.{i}{j}", "two captures in one component"),
            ("{*a}.x.{*b}", "unclear where one ends"),
            ("{*a}x", "a component of its own"),
            ("{i}.{i}", "the same capture twice"),
        ] {
            let (_, fault) = Pattern::parse(text);
            assert!(
                fault.as_ref().is_some_and(|f| f.contains(says)),
                "{text}: {fault:?}"
            );
        }
    }
}
