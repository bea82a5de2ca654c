//! Terms as text, for messages.

use super::{Interpreter, Node, Term};

impl Interpreter<'_> {
    /// The first operands, at any depth, in which two terms that differ do so: terms of other
    /// kinds, or of other parameters.
    pub(super) fn innermost(&self, mut a: Term, mut b: Term) -> (Term, Term) {
        while let Some(next) = {
            let (x, y) = (self.operands(a), self.operands(b));
            let alike = x.len() == y.len() && self.label(a) == self.label(b);
            let differ = |(x, y): &(Term, Term)| x != y;
            alike.then(|| x.into_iter().zip(y).find(differ)).flatten()
        } {
            (a, b) = next;
        }
        (a, b)
    }

    /// The terms that a term is made of.
    fn operands(&self, term: Term) -> Vec<Term> {
        match self.node(term) {
            Node::Initial(_) | Node::Undefined | Node::Const(..) | Node::Index(_) => Vec::new(),
            Node::Written { before, parts } => {
                let values = parts.iter().map(|(_, value)| *value);
                std::iter::once(*before).chain(values).collect()
            }
            Node::Load(a, ..)
            | Node::Acc(a, _)
            | Node::Side(a, _)
            | Node::Cast(a, _)
            | Node::Reduce(_, a, ..)
            | Node::Narrowed(_, a) => vec![*a],
            Node::Anchor(_, inputs) => inputs.clone(),
            Node::Uniform(a, _, _, b) => vec![*a, *b],
            Node::Op(_, args) => args.to_vec(),
        }
    }

    /// A term without its operands, as text.
    fn label(&self, term: Term) -> String {
        match self.node(term) {
            Node::Initial(id) => format!("initial {id}"),
            Node::Undefined => "undefined".into(),
            Node::Written { parts, .. } => {
                let regions = parts.iter().map(|(region, _)| region.to_string());
                format!("stored{}", regions.collect::<String>())
            }
            Node::Load(_, dtype, region) => format!("{}{region}", dtype.name()),
            Node::Acc(_, axes) => format!("acc{axes:?}"),
            Node::Side(_, axes) => format!("side{axes:?}"),
            Node::Anchor(body, _) => body.clone(),
            Node::Const(lane, bits) => format!("{lane:?} {bits:#x}"),
            Node::Index(strides) => format!("index {strides:?}"),
            Node::Uniform(_, region, stream, _) => format!("uniform {stream}{region}"),
            Node::Op(op, _) => op.name().to_string(),
            Node::Cast(_, lane) => format!("{lane:?}"),
            Node::Reduce(op, _, lengths, order) => format!("{op:?} {lengths:?} in order {order}"),
            Node::Narrowed(dtype, _) => dtype.name().to_string(),
        }
    }

    /// A term as text, cut off at a few levels.
    pub(super) fn show(&self, term: Option<Term>) -> String {
        let Some(term) = term else {
            return "not written, or not for all examples".into();
        };
        let mut text = String::new();
        self.write(term, 4, &mut text);
        text
    }

    fn write(&self, term: Term, depth: usize, out: &mut String) {
        if depth == 0 {
            out.push('…');
            return;
        }
        out.push_str(&self.label(term));
        for (at, operand) in self.operands(term).into_iter().enumerate() {
            out.push_str(if at > 0 { ", " } else { "(" });
            self.write(operand, depth - 1, out);
        }
        if !self.operands(term).is_empty() {
            out.push(')');
        }
    }
}
