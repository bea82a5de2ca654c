//! The roles of buffers.

/// The role of a buffer. Reports colour by it; planning ignores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Data that comes from outside.
    Input,
    /// A trained value.
    Weight,
    /// Anything else that outlives a step: moments, statistics, counters.
    State,
    /// A value of the forward pass.
    Activation,
    /// A value of the backward pass.
    Gradient,
    /// A result of the program.
    Output,
    /// Scratch bytes of one task.
    Workspace,
    /// None of these.
    Other,
}

impl Kind {
    /// All kinds, in the order of legends.
    pub const ALL: [Kind; 8] = [
        Kind::Input,
        Kind::Weight,
        Kind::State,
        Kind::Activation,
        Kind::Gradient,
        Kind::Output,
        Kind::Workspace,
        Kind::Other,
    ];

    /// The name shown in reports.
    pub const fn label(self) -> &'static str {
        match self {
            Kind::Input => "input",
            Kind::Weight => "weight",
            Kind::State => "state",
            Kind::Activation => "activation",
            Kind::Gradient => "gradient",
            Kind::Output => "output",
            Kind::Workspace => "workspace",
            Kind::Other => "other",
        }
    }
}
