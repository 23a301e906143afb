//! [`Proxy`]: a TCP proxy that injects faults into its connections.

use std::{net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    time::sleep,
};

/// A fault of new and existing connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// Answers are delayed by this time.
    Delay(Duration),
    /// Connections are closed, and new ones are closed immediately.
    Cut,
    /// Connections stay open, but all data in both directions is discarded.
    Swallow,
    /// Every answer is replaced with these bytes.
    Replace(&'static [u8]),
}

/// A running proxy in front of one port of this machine.
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    fault: watch::Sender<Fault>,
}

impl Proxy {
    /// Starts a proxy for this port. It runs on its own thread, because tests block theirs while they wait.
    pub(crate) fn start(port: u16) -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let fault = watch::Sender::new(Fault::None);
        let (faults, target) = (fault.clone(), SocketAddr::from(([127, 0, 0, 1], port)));
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener).unwrap();
                while let Ok((client, _)) = listener.accept().await {
                    tokio::spawn(forward(client, target, faults.subscribe()));
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

async fn forward(mut client: TcpStream, target: SocketAddr, mut fault: watch::Receiver<Fault>) {
    if *fault.borrow_and_update() == Fault::Cut {
        return;
    }
    let Ok(mut server) = TcpStream::connect(target).await else {
        return;
    };
    let (mut request, mut response) = (vec![0; 65_536], vec![0; 65_536]);
    loop {
        let current = *fault.borrow_and_update();
        if current == Fault::Cut {
            return;
        }
        tokio::select! {
            _ = fault.changed() => {}
            read = client.read(&mut request) => match read {
                Ok(bytes) if bytes > 0 => {
                    if let Fault::Replace(reply) = current {
                        if client.write_all(reply).await.is_err() {
                            return;
                        }
                    } else if current != Fault::Swallow && server.write_all(&request[..bytes]).await.is_err() {
                        return;
                    }
                }
                _ => return,
            },
            read = server.read(&mut response) => match read {
                Ok(bytes) if bytes > 0 => {
                    if let Fault::Delay(delay) = current {
                        sleep(delay).await;
                    }
                    let discarded = matches!(*fault.borrow(), Fault::Swallow | Fault::Replace(_));
                    if !discarded && client.write_all(&response[..bytes]).await.is_err() {
                        return;
                    }
                }
                _ => return,
            },
        }
    }
}
