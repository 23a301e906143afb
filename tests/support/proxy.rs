//! A TCP proxy that breaks what passes through it.

use std::{net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    time::sleep,
};

/// What becomes of connections and of what is sent on them, also of those that are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// Answers come so much later.
    Delay(Duration),
    /// Connections break, and new ones are closed at once.
    Cut,
    /// Connections stay, and nothing comes out of them.
    Swallow,
    /// Every answer is replaced.
    Say(&'static [u8]),
}

pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    fault: watch::Sender<Fault>,
}

impl Proxy {
    /// In front of this port, on a thread of its own: tests wait without giving way.
    pub(crate) fn start(port: u16) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let fault = watch::Sender::new(Fault::None);
        let (faults, to) = (fault.clone(), SocketAddr::from(([127, 0, 0, 1], port)));
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener).unwrap();
                while let Ok((caller, _)) = listener.accept().await {
                    tokio::spawn(pass(caller, to, faults.subscribe()));
                }
            });
        });
        Self { address, fault }
    }

    pub(crate) fn set(&self, fault: Fault) {
        self.fault.send_replace(fault);
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://{}", self.address)
    }
}

async fn pass(mut caller: TcpStream, to: SocketAddr, mut fault: watch::Receiver<Fault>) {
    if *fault.borrow_and_update() == Fault::Cut {
        return;
    }
    let Ok(mut server) = TcpStream::connect(to).await else {
        return;
    };
    let (mut question, mut answer) = (vec![0; 65_536], vec![0; 65_536]);
    loop {
        let now = *fault.borrow_and_update();
        if now == Fault::Cut {
            return;
        }
        tokio::select! {
            _ = fault.changed() => {}
            read = caller.read(&mut question) => match read {
                Ok(bytes) if bytes > 0 => {
                    if let Fault::Say(words) = now {
                        if caller.write_all(words).await.is_err() {
                            return;
                        }
                    } else if now != Fault::Swallow && server.write_all(&question[..bytes]).await.is_err() {
                        return;
                    }
                }
                _ => return,
            },
            read = server.read(&mut answer) => match read {
                Ok(bytes) if bytes > 0 => {
                    if let Fault::Delay(delay) = now {
                        sleep(delay).await;
                    }
                    let silent = matches!(*fault.borrow(), Fault::Swallow | Fault::Say(_));
                    if !silent && caller.write_all(&answer[..bytes]).await.is_err() {
                        return;
                    }
                }
                _ => return,
            },
        }
    }
}
