//! How a case is compiled and run.

use slabwise::CompileOptions;

macro_rules! switches {
    ($($(#[$doc:meta])* $variant:ident $rounds:literal |$options:ident| $change:expr;)*) => {
        /// A change of one compile option.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub enum Switch { $($(#[$doc])* $variant),* }

        impl Switch {
            /// All of them.
            pub const ALL: &[Switch] = &[$(Switch::$variant),*];

            /// Makes the change.
            pub fn apply(self, options: &mut CompileOptions) {
                match self { $(Switch::$variant => { let $options = options; $change; })* }
            }

            /// The change as a line of a program.
            pub fn text(self) -> &'static str {
                match self { $(Switch::$variant => stringify!($change)),* }
            }

            /// Whether sums may be rounded differently.
            pub fn rounds(self) -> bool {
                match self { $(Switch::$variant => $rounds),* }
            }
        }
    };
}

switches! {
    Nothing true |options| options.fuse = slabwise_compiler::passes::Fuse::none();
    Elementwise true |options| options.fuse.elementwise = false;
    Reductions true |options| options.fuse.reductions = false;
    Rows true |options| options.fuse.rows = false;
    Epilogues true |options| options.fuse.epilogues = false;
    FlattenRows true |options| options.fuse.flatten_rows = false;
    Siblings true |options| options.fuse.siblings = false;
    Stored true |options| options.fuse.stored = false;
    Recompute true |options| options.fuse.recompute = false;
    Cse true |options| options.simplify.cse = false;
    Fold true |options| options.simplify.fold = false;
    Algebra true |options| options.simplify.algebra = false;
    Apart false |options| options.planner.reuse = false;
    NotInPlace false |options| options.planner.in_place = false;
    ProgramOrder false |options| options.planner.order = slabwise_planner::OrderPolicy::Program;
    Effortless false |options| options.planner.effort = 0;
    NoGaps false |options| options.shapes.use_gaps = false;
    NoMicroBatch false |options| options.measures.micro_batch = false;
    NoPrologues false |options| options.measures.prologue_fusion = false;
    FullWorkspaces false |options| options.measures.small_workspaces = false;
    Checked false |options| options.check_memory = true;
    Exact true |options| options.shapes.ranges = slabwise::LengthRanges::Exact;
    Doubling true |options| options.shapes.ranges = slabwise::LengthRanges::Growth(100);
}

/// The source of inputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Feed {
    /// Arrays of the host.
    #[default]
    Host,
    /// Buffers of the session.
    Resident,
    /// Buffers of the session; the program's donated input is donated.
    Donated,
}

/// The planner's effort under a budget.
pub const EFFORT: u64 = 20_000;

/// How a case is compiled and run. All others are compared with the default.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    /// Changes of the options.
    pub switches: Vec<Switch>,
    /// Threads of the session.
    pub threads: usize,
    /// Run in dynamic mode, with buffers from the pool.
    pub dynamic: bool,
    /// The budget, as a percentage of the slab.
    pub budget: Option<u32>,
    /// The speed of the link for offload, in bytes per second, if offload is allowed.
    pub offload: Option<u64>,
    /// The source of inputs.
    pub feed: Feed,
    /// Unbounded dimensions become bounded, and bounded ones unbounded.
    pub swap_dims: bool,
    /// Every program is compiled again before each of its runs, and the old one dropped.
    pub anew: bool,
    /// Weights and state are saved after the first run and loaded by another session.
    pub reload: bool,
    /// Each program in its own session; only where none changes a variable that another reads.
    pub alone: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            switches: Vec::new(),
            threads: 1,
            dynamic: false,
            budget: None,
            offload: None,
            feed: Feed::Host,
            swap_dims: false,
            anew: false,
            reload: false,
            alone: false,
        }
    }
}

impl Setup {
    /// Whether results may differ in rounding from those of the default.
    pub fn rounds(&self) -> bool {
        self.swap_dims || self.switches.iter().any(|s| s.rounds())
    }

    /// The options of compilation.
    pub fn options(&self) -> CompileOptions {
        let mut options = CompileOptions::default();
        if self.budget.is_some() {
            // The search for recomputation under a budget uses all of its effort, and there are
            // many programs.
            options.planner.effort = EFFORT;
        }
        self.switches.iter().for_each(|s| s.apply(&mut options));
        options
    }

    /// The differences from the default, in a few words.
    pub fn describe(&self) -> String {
        let mut parts: Vec<String> = self.switches.iter().map(|s| s.text().to_string()).collect();
        let mut say = |on: bool, text: String| on.then(|| parts.push(text));
        say(self.threads != 1, format!("{} threads", self.threads));
        say(self.dynamic, "dynamic".into());
        say(
            self.budget.is_some(),
            format!("{} % of the slab", self.budget.unwrap_or(0)),
        );
        say(
            self.offload.is_some(),
            format!("offload at {} B/s", self.offload.unwrap_or(0)),
        );
        say(
            self.feed != Feed::Host,
            format!("{:?} inputs", self.feed).to_lowercase(),
        );
        say(self.swap_dims, "free for bounded dimensions".into());
        say(self.anew, "compiled anew for each run".into());
        say(self.reload, "saved and loaded".into());
        say(self.alone, "each program alone".into());
        if parts.is_empty() {
            "the default".into()
        } else {
            parts.join(", ")
        }
    }
}
