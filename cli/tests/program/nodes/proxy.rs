//! Somebody between a client and a node, who passes bytes on as it pleases.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};

/// What becomes of bytes on their way.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mischief {
    /// They arrive.
    None,
    /// One byte in so many arrives changed.
    Change { every_bytes: u64 },
    /// After so many bytes the connection is cut.
    CutAfter { bytes: u64 },
    /// Those from the node arrive one by one, with pauses.
    Drip,
}

/// A proxy on this side of the links. It ends with its test's runtime.
pub(crate) struct Proxy {
    pub(crate) address: String,
    rules: Arc<Rules>,
}

struct Rules {
    mischief: Mutex<Mischief>,
    /// Bytes on all connections, to spread changes over.
    passed: AtomicU64,
}

impl Proxy {
    pub(crate) async fn start(node: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let mischief = Mutex::new(Mischief::None);
        let rules = Arc::new(Rules { mischief, passed: AtomicU64::new(0) });
        let proxy = Self { address, rules: rules.clone() };
        let node = node.to_owned();
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let Ok(far) = TcpStream::connect(&node).await else { continue };
                let _ = (near.set_nodelay(true), far.set_nodelay(true));
                let ((near_in, near_out), (far_in, far_out)) =
                    (near.into_split(), far.into_split());
                let (there, back) = (rules.clone(), rules.clone());
                tokio::spawn(async move {
                    // When one direction ends both do.
                    tokio::select! {
                        _ = pass(near_in, far_out, &there, false) => {}
                        _ = pass(far_in, near_out, &back, true) => {}
                    }
                });
            }
        });
        proxy
    }

    /// From now on, on connections that exist too.
    pub(crate) fn play(&self, mischief: Mischief) {
        *self.rules.mischief.lock().unwrap() = mischief;
    }
}

async fn pass(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    rules: &Rules,
    is_from_node: bool,
) -> io::Result<()> {
    let mut bytes = vec![0; 16 << 10];
    let mut passed_here = 0;
    loop {
        let read = from.read(&mut bytes).await?;
        if read == 0 {
            return Ok(());
        }
        let before = rules.passed.fetch_add(read as u64, Ordering::Relaxed);
        let some = &mut bytes[..read];
        let mischief = *rules.mischief.lock().unwrap();
        match mischief {
            Mischief::None => to.write_all(some).await?,
            Mischief::Change { every_bytes } => {
                let next = before.next_multiple_of(every_bytes) - before;
                if let Some(byte) = usize::try_from(next).ok().and_then(|at| some.get_mut(at)) {
                    *byte ^= 0x10;
                }
                to.write_all(some).await?;
            }
            Mischief::CutAfter { bytes } => {
                let left = bytes.saturating_sub(passed_here) as usize;
                to.write_all(&some[..left.min(read)]).await?;
                if left < read {
                    return Ok(());
                }
            }
            Mischief::Drip if !is_from_node => to.write_all(some).await?,
            Mischief::Drip => {
                for byte in some.iter() {
                    if !matches!(*rules.mischief.lock().unwrap(), Mischief::Drip) {
                        // The rest would only keep the connection busy.
                        return Ok(());
                    }
                    to.write_all(&[*byte]).await?;
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
        passed_here += read as u64;
    }
}
