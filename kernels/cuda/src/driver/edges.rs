//! The edges of a graph that is being captured, set explicitly instead of following the order of
//! calls.
//!
//! A stream that is being captured has a front: the nodes that the next node will depend on.
//! Setting the front makes any acyclic graph from one stream. The driver has these calls since CUDA
//! 12.3; on older drivers a captured graph is a chain.

use std::ffi::{c_int, c_uint};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

use cudarc::driver::sys::{CUgraph, CUgraphEdgeData, CUgraphNode, CUresult, CUstream};

use super::calls::{self, Status};
use super::{Result, Stream, check};

/// A node of a graph that is being captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Node(CUgraphNode);

type GetCaptureInfo = unsafe extern "C" fn(
    CUstream,
    *mut c_int,
    *mut u64,
    *mut CUgraph,
    *mut *const CUgraphNode,
    *mut *const CUgraphEdgeData,
    *mut usize,
) -> Status;
type UpdateCaptureDependencies = unsafe extern "C" fn(
    CUstream,
    *mut CUgraphNode,
    *const CUgraphEdgeData,
    usize,
    c_uint,
) -> Status;
type NodeGetType = unsafe extern "C" fn(CUgraphNode, *mut c_int) -> Status;

/// The status of a stream that is being captured; the others are none and invalidated.
const ACTIVE: c_int = 1;
/// Replaces the front instead of adding to it.
const SET: c_uint = 1;
/// The type of nodes that run a kernel.
const KERNEL: c_int = 0;
/// The type of an edge whose target may start before its source has ended (programmatic launch).
const PROGRAMMATIC: u8 = 1;
/// The source port of such an edge: it fires when all blocks of a kernel have triggered it or
/// ended.
const PORT_PROGRAMMATIC: u8 = 1;

/// The driver's calls for edges.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Edges {
    info: GetCaptureInfo,
    update: UpdateCaptureDependencies,
    type_of: NodeGetType,
}

impl Edges {
    /// The calls, if the driver has all of them.
    pub fn of_driver() -> Option<Edges> {
        static FOUND: OnceLock<Option<Edges>> = OnceLock::new();
        *FOUND.get_or_init(|| {
            // SAFETY: the driver is open, and the calls have had these types since they exist.
            let found = unsafe {
                Edges {
                    info: calls::find("cuStreamGetCaptureInfo_v3")?,
                    update: calls::find("cuStreamUpdateCaptureDependencies_v2")?,
                    type_of: calls::find("cuGraphNodeGetType")?,
                }
            };
            Some(found)
        })
    }

    /// The nodes that the next node of a stream that is being captured will depend on.
    pub fn front(&self, stream: &Stream) -> Result<Vec<Node>> {
        let mut capture = 0;
        let (mut nodes, mut edges, mut count) = (null(), null(), 0);
        // SAFETY: the stream lives, and the pointers are valid for writing; properties whose
        // pointers are null are not requested.
        let status = unsafe {
            (self.info)(
                stream.raw,
                &mut capture,
                null_mut(),
                null_mut(),
                &mut nodes,
                &mut edges,
                &mut count,
            )
        };
        let call = "cuStreamGetCaptureInfo";
        check(call, status)?;
        if capture != ACTIVE {
            // The call succeeds, and sets no nodes.
            check(
                call,
                CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED as Status,
            )?;
        }
        // SAFETY: the driver sets the pointer to so many nodes, which stay until the next call for
        // this stream.
        Ok((0..count)
            .map(|at| Node(unsafe { *nodes.add(at) }))
            .collect())
    }

    /// Makes the next node depend on these. If it is `early`, it is a kernel that itself waits for
    /// the kernels among them.
    pub fn set_front(&self, stream: &Stream, front: &[Node], early: bool) -> Result<()> {
        let mut nodes: Vec<CUgraphNode> = front.iter().map(|node| node.0).collect();
        let edge = |node: &Node| -> Result<CUgraphEdgeData> {
            let (mut kind, whole) = (
                -1,
                CUgraphEdgeData {
                    from_port: 0,
                    to_port: 0,
                    type_: 0,
                    reserved: [0; 5],
                },
            );
            if early {
                // SAFETY: the node is one of the graph being recorded, and the pointer is valid for
                // writing.
                check("cuGraphNodeGetType", unsafe {
                    (self.type_of)(node.0, &mut kind)
                })?;
            }
            Ok(if kind == KERNEL {
                CUgraphEdgeData {
                    from_port: PORT_PROGRAMMATIC,
                    type_: PROGRAMMATIC,
                    ..whole
                }
            } else {
                whole
            })
        };
        let edges = front.iter().map(edge).collect::<Result<Vec<_>>>()?;
        // SAFETY: the stream lives and is being captured; both lists have the stated length and are
        // copied.
        let updated = unsafe {
            (self.update)(
                stream.raw,
                nodes.as_mut_ptr(),
                edges.as_ptr(),
                nodes.len(),
                SET,
            )
        };
        check("cuStreamUpdateCaptureDependencies", updated)
    }
}

/// How kernels are captured.
#[derive(Debug)]
pub(crate) struct Recording<'a> {
    pub stream: &'a Stream,
    pub edges: Option<Edges>,
    /// Whether a kernel is launched before the kernels that it depends on have ended.
    pub early: bool,
}

impl Recording<'_> {
    /// Lets the next node, a kernel of slabwise, be launched early, if kernels are.
    pub fn launch_early(&self) -> Result<()> {
        match self.edges {
            Some(edges) if self.early => {
                edges.set_front(self.stream, &edges.front(self.stream)?, true)
            }
            _ => Ok(()),
        }
    }

    /// A fork at the nodes that the next node would depend on; `None` if the graph is a chain.
    pub fn fork(&self) -> Result<Option<Fork<'_>>> {
        let fork = |edges: Edges| {
            let front = edges.front(self.stream)?;
            Ok(Fork {
                stream: self.stream,
                edges,
                front,
            })
        };
        self.edges.map(fork).transpose()
    }
}

/// A place in a graph from which several kernels start side by side.
#[derive(Debug)]
pub(crate) struct Fork<'a> {
    stream: &'a Stream,
    edges: Edges,
    front: Vec<Node>,
}

impl Fork<'_> {
    /// Lets the next node start at the fork.
    pub fn start(&self) -> Result<()> {
        self.edges.set_front(self.stream, &self.front, false)
    }

    /// The nodes at the end of a branch.
    pub fn end(&self) -> Result<Vec<Node>> {
        self.edges.front(self.stream)
    }

    /// Makes the next node depend on these ends of branches, or, if there are none, on the fork.
    pub fn join(&self, ends: &[Node]) -> Result<()> {
        let front = if ends.is_empty() { &self.front } else { ends };
        self.edges.set_front(self.stream, front, false)
    }
}
