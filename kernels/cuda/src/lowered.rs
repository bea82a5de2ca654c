//! A spec lowered for CUDA: its functions, their launches for the sizes of a run, and the
//! computation by a library that precedes them.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use slabwise_kernels::size::Env;

use crate::abi::{Dispatch, Function};
use crate::driver::{DriverError, Stream};
use crate::handles::Handles;
use crate::libraries::LibraryError;

/// The alignment of workspaces, bytes.
pub(crate) const WORKSPACE_ALIGN: u64 = 256;

/// A computation by a library, its sizes still symbolic.
pub(crate) trait LibraryCall: fmt::Debug + Send + Sync {
    /// The name of the library's kernel.
    fn name(&self) -> String;

    /// Opens the library. It allocates device memory then, which must not happen during a run.
    fn open(&self, libraries: &Handles) -> Result<(), LibraryError>;

    /// Checks that the library accepts the computation at the sizes of a run.
    fn check(&self, env: &Env, libraries: &Handles) -> Result<(), LibraryError>;

    /// Submits the computation at the sizes of a run, or captures it.
    ///
    /// # Safety
    /// `argument` gives the addresses of regions that hold the arguments of the spec at these
    /// sizes. From `workspace` on, as many bytes are valid as the lowered spec requests.
    unsafe fn submit(
        &self,
        env: &Env,
        argument: &dyn Fn(u16) -> u64,
        workspace: u64,
        libraries: &Handles,
        stream: &Stream,
    ) -> Result<(), DriverError>;
}

/// The algorithms that a library chose for the sizes of recent runs, the latest last. They are chosen
/// again for a copy.
#[derive(Debug)]
pub(crate) struct RecentAlgorithms<A>(Mutex<Vec<(Env, A)>>);

/// The maximum number of sizes for which algorithms are kept.
const SIZES_MAX: usize = 8;

impl<A> Default for RecentAlgorithms<A> {
    fn default() -> Self {
        RecentAlgorithms(Mutex::default())
    }
}

impl<A> Clone for RecentAlgorithms<A> {
    fn clone(&self) -> Self {
        RecentAlgorithms::default()
    }
}

impl<A: Copy> RecentAlgorithms<A> {
    /// The algorithm for these sizes, chosen by `choose` if it is not known.
    pub fn get_or(
        &self,
        env: &Env,
        choose: impl FnOnce() -> Result<A, LibraryError>,
    ) -> Result<A, LibraryError> {
        let list = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = list().iter().find(|(sizes, _)| sizes == env).copied();
        if let Some((_, algorithm)) = known {
            return Ok(algorithm);
        }
        let algorithm = choose()?;
        let mut list = list();
        if list.len() == SIZES_MAX {
            list.remove(0);
        }
        list.push((*env, algorithm));
        Ok(algorithm)
    }
}

/// The launches of a run, given its sizes.
type Launches = dyn Fn(&Env) -> Vec<Dispatch> + Send + Sync;

/// A spec lowered for CUDA, its sizes still symbolic.
pub struct Lowered {
    /// Every function that a launch may name.
    pub functions: Vec<Function>,
    /// The workspace that a run needs, bytes, for all sizes up to the bounds; its alignment is 256.
    pub workspace: u64,
    /// The number of counters that a launch needs, for all sizes up to the bounds; see
    /// [`Word::Counters`](crate::Word::Counters).
    pub counters: usize,
    /// Whether its launches may run in any order or concurrently: none accesses memory that another
    /// one writes.
    pub side_by_side: bool,
    /// The computation by a library that precedes the launches.
    pub(crate) by_library: Option<Box<dyn LibraryCall>>,
    launches: Box<Launches>,
}

impl Lowered {
    /// `launches` returns the launches, in order, for the sizes of a run, which are at most the
    /// bounds.
    pub fn new(
        functions: Vec<Function>,
        workspace: u64,
        launches: impl Fn(&Env) -> Vec<Dispatch> + Send + Sync + 'static,
    ) -> Self {
        Lowered {
            functions,
            workspace,
            counters: 0,
            side_by_side: false,
            by_library: None,
            launches: Box::new(launches),
        }
    }

    /// The same kernel with counters.
    pub fn with_counters(self, counters: usize) -> Lowered {
        Lowered { counters, ..self }
    }

    /// The name of the library's kernel, if a library computes part of it.
    pub fn library(&self) -> Option<String> {
        self.by_library.as_ref().map(|call| call.name())
    }

    /// The launches of a run with these sizes, one after the other on one stream unless they are
    /// [`Lowered::side_by_side`].
    pub fn launches(&self, env: &Env) -> Vec<Dispatch> {
        let mut list = (self.launches)(env);
        list.retain(|d| d.grid.iter().all(|&n| n > 0));
        list
    }
}

impl fmt::Debug for Lowered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lowered")
            .field("functions", &self.functions)
            .field("workspace", &self.workspace)
            .finish_non_exhaustive()
    }
}
