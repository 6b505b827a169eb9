/* lifecycle.pml - the life of worker groups, as one Promela process: one `do` of guarded atomic actions over a global
 * state. An action is what one party does in one indivisible step. A pause, a delay, a slow network is "the action is
 * not taken yet", so every interleaving of client, broker, workers, driver calls under way and two controllers (leader
 * and standby) is explored. Faults have budgets (CUTS, WCR, RET, ...); a budget may be dropped at any time, so that "no
 * fault happens" is explored too. When no action is left, everything must have come to its end.
 *
 * Without -D it is the protocol of the code. README.md says what is checked; variants.toml lists the flags that break
 * one step each, and what then happens. The modules of the code that a part speaks of are named at that part.
 */

/* ------------------------------------------------------------------------------------------------ bounds and faults */
#ifndef NREQ
#define NREQ 2    /* requests */
#endif
#ifndef NKEY
#define NKEY 1    /* keys; request r is for key r modulo NKEY */
#endif
#ifndef SLOTS
#define SLOTS 1   /* workers of a group */
#endif
#ifndef CUTS
#define CUTS 1    /* cut connections of a controller (pause, partition, crash): the token moves, the owner may not know */
#endif
#ifndef WCR
#define WCR 1     /* crashes of a worker, or cuts of its connection */
#endif
#ifndef RET
#define RET 2     /* idle timers that fire: Active -> Unbound */
#endif
#ifndef TTL
#define TTL 0     /* requests that expire in their queue */
#endif
#ifndef QDN
#define QDN 0     /* losses of a queue's Raft leader: a passive declare then answers (0,0) whatever is in it */
#endif
#ifndef SF
#define SF 0      /* starts that fail for good */
#endif
#ifndef TDEL
#define TDEL 0    /* deletions of the leader queue: the token is free, its holder hears of it and may act until then */
#endif
#ifndef EV
#define EV 0      /* evidence accepted right before the deletion; 0 is the probe */
#endif
#ifdef NONUNIQUE
#define SPK 2     /* places for workers of a key */
#else
#define SPK SLOTS
#endif

#define ALL ((1<<NREQ)-1)
#define B(r) (1<<(r))
#define H(h) ((1<<(h))>>1)              /* "number of the request + 1, or 0 for none" as a mask */
#define KEYOF(r) ((r)%NKEY)
#define OTHER(k) (1-(k))
#define X(c,k) ((c)*NKEY+(k))
#define S(k,j) ((k)*SPK+(j))
#if NKEY == 2
#define FORALLK(M,c) M(c,0) M(c,1)
#else
#define FORALLK(M,c) M(c,0)
#endif

/* ------------------------------------------------------------------------------------------------------------ state */
/* client: masks over request numbers: published; confirmed to the client; answered (reply, error reply, dead letter) */
byte pub, conf, rep;
/* broker */
byte orph;                              /* ready in the orphan queue */
byte tq[NKEY];                          /* routed to the request queue, not yet in it, not yet confirmed */
byte rdy[NKEY];                         /* ready in the request queue */
byte gh[NKEY]; bit gc[NKEY];            /* held by, consumer of, a dead connection that the broker has not noticed */
byte dlr[NKEY];                         /* RETAIN: expired, waits inside the queue for the dead letter's confirm */
bit qx[NKEY], qb[NKEY], qdown[NKEY];    /* the queue exists, is bound, has lost its Raft leader for a while */
bit smp[NKEY], smpv[NKEY];              /* sample of the management API: "messages == 0"; there is one */
bit act[NKEY];                          /* an activity report is on its way */
byte tok;                               /* leader token: 0 free, else controller + 1 */
#ifdef LIMIT
byte dc[NREQ];                          /* how often the request was taken back */
#endif
/* workers, by S(key, slot) */
#define RUN 1
#define STOPPING 2
#define CUT 3                           /* runs, but its connection is gone */
byte wst[NKEY*SPK]; bit wcon[NKEY*SPK]; byte wheld[NKEY*SPK];
/* controllers, most by X(controller, key) */
bit con[2];                             /* the broker still has its connection */
byte up[2];                             /* 1 standby, 2 believes that it leads */
byte want[2*NKEY];                      /* tracker: 0 absent, 1 Active, 2 Unbound */
byte rq[2*NKEY];                        /* queue facts of this term: 0 none, 1 exists (binding unknown), 2 bind-ok,
                                           3 unbind-ok */
byte qp[2*NKEY];                        /* queue command sent: 1 unbind, 2 delete */
#ifdef DECLASIDE
bit dp[2*NKEY];                         /* declaration sent over another channel than the token's, not carried out yet */
byte dlate[NKEY];                       /* the same, of a term that has ended */
#endif
byte wp[2*NKEY];                        /* driver calls under way, a mask; they outlive leadership and the process */
#define STARTOF(j) (1<<(j))
#define STOPOF(j)  (4<<(j))
#define STARTS(c,k) (wp[X(c,k)] & 3)
#define ENDS(c,k)   (wp[X(c,k)] >> 2)
bit est[2*NKEY];                        /* EDGE, ADMEDGE: "this was done" */
#ifdef ADMIT
bit place[2*NKEY];                      /* the group has a place under max_groups */
#endif
byte op[2], oh[2], oid[2];              /* orphan processor: phase; held at the broker; in memory */
#if SF > 0
bit failed[2*NKEY];                     /* the start failed for good */
bit fcon[2*NKEY]; byte fheld[2*NKEY];   /* the responder consumes the queue; holds */
byte fmem[2*NKEY];                      /* SFACKFIRST: in memory only */
#endif
#ifdef PRELIST
byte pre[2*NKEY]; bit prev[2];
#endif
byte cc = CUTS, wcr = WCR, ret = RET, ttl = TTL, qdn = QDN, sfl = SF;
#if TDEL > 0
byte tdl = TDEL;
bit gone[2];                            /* the queue of its token was deleted, and it has not noticed */
#endif
byte fault;
#define FAIL(n) fault=n; assert(fault!=n)
#define LOST 1            /* no queue or process holds a confirmed request */
#define NO_OUTCOME 2      /* the end has come, and a request has no outcome */
#define WRONG_END 3       /* the end has come, and queues, bindings, workers are not what is wanted */
#define BUSY_STOPPED 4    /* the true leader stopped a worker that held a request */
#define LIMIT_REACHED 5   /* a request was taken back too often, although no worker ever failed of it */
#define NO_ROOM 6         /* more groups run than max_groups */

/* ---------------------------------------------------------------------------------------------------------- derived */
#if SF > 0
#define FHELD(k) (H(fheld[X(0,k)]) | H(fheld[X(1,k)]))
#define FCONS(k) (fcon[X(0,k)] || fcon[X(1,k)])
#define FAILED(c,k) failed[X(c,k)]
#else
#define FHELD(k) 0
#define FCONS(k) false
#define FAILED(c,k) false
#endif
#if SPK == 2
#define HELD(k)  (H(wheld[S(k,0)]) | H(wheld[S(k,1)]) | FHELD(k))
#define CONS(k)  (wcon[S(k,0)] || wcon[S(k,1)] || FCONS(k))
#define NINST(k) ((wst[S(k,0)]!=0) + (wst[S(k,1)]!=0))
#define STOPPABLE(k) (ALIVE(k,0) | (ALIVE(k,1)<<1))
#define EACHPLACE(M,c,k) M(c,k,0) M(c,k,1)
#else
#define HELD(k)  (H(wheld[S(k,0)]) | FHELD(k))
#define CONS(k)  (wcon[S(k,0)] || FCONS(k))
#define NINST(k) (wst[S(k,0)]!=0)
#define STOPPABLE(k) ALIVE(k,0)
#define EACHPLACE(M,c,k) M(c,k,0)
#endif
#define ALIVE(k,j) (wst[S(k,j)]==RUN || wst[S(k,j)]==CUT)
#define QALL(k)  (rdy[k]|gh[k]|dlr[k]|tq[k]|HELD(k))
#if NKEY == 2
#define ALLQ (QALL(0)|QALL(1))
#else
#define ALLQ QALL(0)
#endif
#define SAFE_NOW (((conf & (ALL ^ (rep|orph|H(oh[0])|H(oh[1])|ALLQ)))) == 0)
#define TOTAL0(k) (rdy[k]==0 && gh[k]==0 && HELD(k)==0 && dlr[k]==0)

/* Evidence right before the deletion (osrdyne/broker/queues/safe_delete.py). */
#define HELD_BY_NONE(k) (rdy[k]==0 && !CONS(k) && HELD(k)==0 && gh[k]==0 && !gc[k])
#define PROBE(k) (HELD_BY_NONE(k) && !qdown[k])     /* a consumer of our own is counted, and the only holder */
#if EV == 0
#define EVIDENCE(k) PROBE(k)
#elif EV == 1      /* passive declare: ready 0 */
#define EVIDENCE(k) (rdy[k]==0)
#elif EV == 2      /* passive declare: ready 0 and consumers 0; so answers a queue without its Raft leader, too */
#define EVIDENCE(k) (qdown[k] || HELD_BY_NONE(k))
#elif EV == 3      /* the same on a classic queue: a holder whose consumer was cancelled is not counted */
#define EVIDENCE(k) (rdy[k]==0 && !CONS(k) && !gc[k])
#elif EV == 4      /* management API: messages 0 in a sample of unknown age */
#define EVIDENCE(k) (smpv[k] && smp[k])
#elif EV == 5      /* the same in a sample taken after unbind and settling */
#define EVIDENCE(k) (smpv[k] && smp[k])
#elif EV == 6      /* the controller empties the queue by basic.get and republishes, then deletes */
#define EVIDENCE(k) (rdy[k]==0)
#elif EV == 7      /* probe and fresh sample */
#define EVIDENCE(k) (PROBE(k) && smpv[k] && smp[k])
#endif
#define FRESH (EV==5 || EV==7)

/* Who may act at the broker (osrdyne/broker/leadership/token.py): commands travel over the channel that holds the token. */
#ifdef UNFENCED
#define FENCE(c) true
#define SENT(c)  true
#elif defined(OTHERCH)
#define FENCE(c) con[c]
#define SENT(c)  true             /* once sent it acts, token or not */
#else
#define FENCE(c) con[c]
#define SENT(c)  con[c]           /* same channel: carried out before the token moves on, or never */
#endif
#ifdef NOLEASE
#define DRVOK(c) true
#else
#define DRVOK(c) con[c]           /* a controller that has lost its connection decides no more driver calls */
#endif
#ifdef NOLEADER
#define MAYLEAD(c) true
#elif TDEL > 0 && !defined(NOOUTWAIT)
#define MAYLEAD(c) (tok==0 && !gone[OTHER(c)])  /* a leader of a new leader queue outwaits the earlier one */
#else
#define MAYLEAD(c) (tok==0)
#endif
#ifdef NOSETTLE
#define SETTLED(k) true
#else
#define SETTLED(k) (tq[k]==0)     /* assumed: the settling is longer than a publish is under way in the broker */
#endif
#if defined(NOPIN) || defined(REREQ)
#define PINNED(c,k) false
#else
#define PINNED(c,k) (op[c]!=0 && KEYOF(oid[c])==k)
#endif

/* ------------------------------------------------------------------------------------------------ client and broker */
/* Taken back from its holder; beyond the delivery limit it is dead-lettered, which is an outcome. */
#ifdef LIMIT
#ifdef P6
#define DIES(r) FAIL(LIMIT_REACHED)
#elif defined(DROPDEAD)
#define DIES(r) skip                     /* a queue without a dead letter exchange */
#else
#define DIES(r) rep=rep|B(r)
#endif
#define BACK1(r,k,m) if :: ((m) & B(r)) -> dc[r]++; if :: dc[r]>LIMIT -> DIES(r) :: else -> rdy[k]=rdy[k]|B(r) fi \
                        :: else fi;
#if NREQ == 3
#define BACK(k,m) BACK1(0,k,m) BACK1(1,k,m) BACK1(2,k,m)
#elif NREQ == 2
#define BACK(k,m) BACK1(0,k,m) BACK1(1,k,m)
#else
#define BACK(k,m) BACK1(0,k,m)
#endif
#else
#define BACK(k,m) rdy[k]=rdy[k]|(m);
#endif

#define CLIENT(r,k) \
   :: d_step{ !(pub & B(r)) && (r==0 || (pub & (B(r)>>1))) -> \
        printf("client publishes %d (bound=%d)\n",r,qb[k]); pub = pub|B(r); \
        if :: qb[k] -> tq[k] = tq[k]|B(r) :: else -> orph = orph|B(r); conf = conf|B(r) fi }
#define ENQ(r,k) \
   :: d_step{ (tq[k] & B(r)) && !qdown[k] -> \
        printf("broker: %d enters the queue, confirmed\n",r); tq[k] = tq[k]-B(r); rdy[k] = rdy[k]|B(r); conf = conf|B(r) }
#define DELIVER(r,k,s) \
   :: d_step{ (rdy[k] & B(r)) && !qdown[k] && wst[s]==RUN && wcon[s] && wheld[s]==0 -> \
        printf("deliver %d to worker %d, report sent\n",r,s); rdy[k]=rdy[k]-B(r); wheld[s]=r+1; act[k]=1 } \
   :: d_step{ (rdy[k] & B(r)) && !qdown[k] && !act[k] && wst[s]==RUN && wcon[s] && wheld[s]==0 -> \
        printf("deliver %d to worker %d, report LOST\n",r,s); rdy[k]=rdy[k]-B(r); wheld[s]=r+1 }
#define GHOST(r,k) \
   :: d_step{ (rdy[k] & B(r)) && !qdown[k] && gc[k] && gh[k]==0 -> \
        printf("deliver %d to a dead connection\n",r); rdy[k]=rdy[k]-B(r); gh[k]=gh[k]|B(r) }
#define EXPIRE(r,k) \
   :: d_step{ ttl>0 && (rdy[k] & B(r)) -> printf("%d expires\n",r); ttl--; rdy[k]=rdy[k]-B(r); EXPIRED(r,k) }
#ifdef RETAIN
#define EXPIRED(r,k) dlr[k]=dlr[k]|B(r)
#define RELEASE(r,k) \
   :: d_step{ (dlr[k] & B(r)) -> printf("%d dead-lettered\n",r); dlr[k]=dlr[k]-B(r); rep=rep|B(r) }
#else
#define EXPIRED(r,k) rep=rep|B(r)
#define RELEASE(r,k)
#endif
#define RABBITMQ(k) \
   :: d_step{ (gc[k] || gh[k]!=0) && !qdown[k] -> \
        printf("broker notices dead connections, takes back %d\n",gh[k]); BACK(k,gh[k]) gh[k]=0; gc[k]=0 } \
   :: d_step{ qdn>0 && qx[k] && !qdown[k] -> printf("queue leader unavailable\n"); qdn--; qdown[k]=1 } \
   :: d_step{ qdown[k] -> printf("queue leader back\n"); qdown[k]=0 } \
   SAMPLE(k)
#if EV == 4 || EV == 5 || EV == 7
#define SMP0(k) (qdown[k] || TOTAL0(k))      /* zeros too while the queue's leader does not answer */
#define SAMPLE(k) \
   :: d_step{ qx[k] && (!smpv[k] || smp[k]!=SMP0(k)) -> \
        printf("management sample: empty=%d (truth %d)\n",SMP0(k),TOTAL0(k)); smpv[k]=1; smp[k]=SMP0(k) }
#else
#define SAMPLE(k)
#endif

/* ---------------------------------------------------------------------------------------------------------- workers */
#define WORKER(s,k) \
   :: d_step{ wst[s]==RUN && !wcon[s] && qx[k] && !qdown[k] -> printf("worker %d consumes\n",s); wcon[s]=1 } \
   :: d_step{ wheld[s]!=0 && !(rep & H(wheld[s])) -> \
        printf("worker %d replies %d\n",s,wheld[s]-1); rep = rep|H(wheld[s]) } \
   :: d_step{ wheld[s]!=0 && (rep & H(wheld[s])) -> printf("worker %d acks %d\n",s,wheld[s]-1); wheld[s]=0 } \
   :: d_step{ wst[s]==STOPPING && wheld[s]==0 -> printf("worker %d exits\n",s); wst[s]=0 } \
   :: d_step{ wst[s]==STOPPING && wheld[s]!=0 -> \
        printf("worker %d killed while it holds %d\n",s,wheld[s]-1); gh[k]=gh[k]|H(wheld[s]); wheld[s]=0; wst[s]=0 } \
   :: d_step{ wcr>0 && (wst[s]==RUN||wst[s]==STOPPING) -> \
        printf("worker %d dies (broker has not noticed)\n",s); wcr--; \
        gh[k]=gh[k]|H(wheld[s]); gc[k]=gc[k]||wcon[s]; wheld[s]=0; wcon[s]=0; wst[s]=0 } \
   :: d_step{ wcr>0 && wst[s]==RUN && wcon[s] -> \
        printf("worker %d: connection cut (broker has not noticed)\n",s); wcr--; \
        gh[k]=gh[k]|H(wheld[s]); gc[k]=1; wheld[s]=0; wcon[s]=0; wst[s]=CUT } \
   :: d_step{ wst[s]==CUT -> printf("worker %d notices, exits\n",s); wst[s]=0 }

/* ------------------------------------------------------- tracker and idle judge (osrdyne/pool/state/tracker.py, idle_judge) */
#ifdef STOPBLIND
#define IDLE(k) true
#else
#define IDLE(k) TOTAL0(k)        /* messages == 0, ready and unacknowledged, in a sample taken after unbind and settling */
#endif
#ifdef RETIRE
#define AWAKES(c,k) false                         /* ordered to end: what its workers still do does not keep it */
#define JUDGED(k) (TOTAL0(k) || NINST(k)==0)      /* and it waits until they are done */
#else
#define AWAKES(c,k) (want[X(c,k)]==2)
#define JUDGED(k) true
#endif
#define TRACKER(c,k) \
   :: d_step{ up[c]==2 && want[X(c,k)]==1 && ret>0 && !PINNED(c,k) -> \
        printf("c%d: key %d Active -> Unbound (timer)\n",c,k); ret--; want[X(c,k)]=2 } \
   :: d_step{ up[c]==2 && con[c] && act[k] -> \
        printf("c%d: activity of key %d\n",c,k); act[k]=0; \
        if :: AWAKES(c,k) || (want[X(c,k)]==0 && rq[X(c,k)]>0) -> want[X(c,k)]=1 :: else fi } \
   :: d_step{ up[c]==2 && want[X(c,k)]==2 && UNBOUND(c,k) && qp[X(c,k)]==0 && con[c] && !qdown[k] && SETTLED(k) && JUDGED(k) -> \
        printf("c%d: key %d stop timer, empty=%d\n",c,k,TOTAL0(k)); \
        if :: IDLE(k) -> want[X(c,k)]=0; if :: FRESH -> smpv[k]=0 :: else fi :: else -> want[X(c,k)]=1 fi } \
   ENDWITHOUT(c,k) MAKEROOM(c,k)
#ifdef KEEPUNBOUND
#define ENDWITHOUT(c,k)
#else
#define ENDWITHOUT(c,k) \
   :: d_step{ up[c]==2 && want[X(c,k)]==2 && rq[X(c,k)]==0 && qp[X(c,k)]==0 && !DECLARING(c,k) -> \
        printf("c%d: key %d stop timer, there is no queue\n",c,k); want[X(c,k)]=0 }
#endif

/* Admission (osrdyne/pool/state/admission.py, room_maker.py): one place for two keys. Who runs has a place, whatever the limit;
 * a place is given back when the group is not wanted and its workers are gone. A group without a place is bound and has
 * no worker; the other one, as far as it is known to be idle, makes room by the same way as after its idle timer:
 * unbound, proven empty, stopped. */
#ifdef ADMIT
#define ROOM(c,k) (place[X(c,k)])
#define FORGETPLACE(c,k) place[X(c,k)]=0;
#ifdef ADMDESIRED
#define ENDED(c,k) (want[X(c,k)]==0)                /* room is counted by wishes: a worker that still ends is forgotten */
#else
#define ENDED(c,k) (want[X(c,k)]==0 && NINST(k)==0 && wp[X(c,k)]==0)
#endif
#define PLACES(c,k) \
   :: d_step{ up[c]==2 && !place[X(c,k)] && !ENDED(c,k) && (NINST(k)>0 || !place[X(c,OTHER(k))] && RUNSNOT(OTHER(k))) -> \
        printf("c%d: key %d has a place\n",c,k); place[X(c,k)]=1 } \
   :: d_step{ up[c]==2 && place[X(c,k)] && ENDED(c,k) -> printf("c%d: key %d gives its place back\n",c,k); place[X(c,k)]=0 }
#ifdef ADMDESIRED
#define RUNSNOT(k) true
#else
#define RUNSNOT(k) (NINST(k)==0)
#endif
#ifdef ADMNONE
#define MAKEROOM(c,k) PLACES(c,k)
#else
#define MAKEROOM(c,k) \
   PLACES(c,k) \
   :: d_step{ up[c]==2 && want[X(c,k)]==1 && !PINNED(c,k) && place[X(c,k)] && \
              want[X(c,OTHER(k))]==1 && !place[X(c,OTHER(k))] -> \
        printf("c%d: key %d makes room\n",c,k); want[X(c,k)]=ROOMSTEP }
#endif
#ifdef ADMNOW
#define ROOMSTEP 0               /* its worker is stopped at once, without unbinding and evidence */
#else
#define ROOMSTEP 2
#endif
#else
#define ROOM(c,k) true
#define MAKEROOM(c,k)
#define FORGETPLACE(c,k)
#endif

/* ------------------------------------- request queues loop (osrdyne/pool/queues/loop.py, planning.plan_queue) */
/* A publish that was routed to a queue which is then deleted IS confirmed by RabbitMQ. */
#define DODELETE(k) qx[k]=0; qb[k]=0; qdown[k]=0; conf=conf|tq[k]; tq[k]=0; rdy[k]=0; gh[k]=0; gc[k]=0; dlr[k]=0; \
                    smpv[k]=0; DROPW(k); DROPF(k)
#if SPK == 2
#define DROPW(k) wheld[S(k,0)]=0; wcon[S(k,0)]=0; wheld[S(k,1)]=0; wcon[S(k,1)]=0
#else
#define DROPW(k) wheld[S(k,0)]=0; wcon[S(k,0)]=0
#endif
#if SF > 0
#define DROPF(k) fheld[X(0,k)]=0; fcon[X(0,k)]=0; fheld[X(1,k)]=0; fcon[X(1,k)]=0
#else
#define DROPF(k) skip
#endif
#ifdef BINDRACE
#define BINDOK(c,k) true
#elif defined(BINDFIRST)
#define BINDOK(c,k) (!(wp[X(c,k)] & STOPOF(0)))     /* waits for the stop of the first worker only */
#else
#define BINDOK(c,k) (ENDS(c,k)==0)
#endif
#ifdef DELBOUND
#define UNBOUND(c,k) true
#define UNBINDWHEN(c,k) false
#define CHECKWHEN(c,k) (rq[X(c,k)]>=1)
#else
#ifdef ASSUMEUNB
#define UNBOUND(c,k) (rq[X(c,k)]==1 || rq[X(c,k)]==3)
#define UNBINDWHEN(c,k) (want[X(c,k)]!=1 && rq[X(c,k)]==2)
#else
#define UNBOUND(c,k) (rq[X(c,k)]==3)
#define UNBINDWHEN(c,k) (want[X(c,k)]!=1 && (rq[X(c,k)]==1 || rq[X(c,k)]==2))
#endif
#define CHECKWHEN(c,k) UNBOUND(c,k)
#endif
#ifdef ANYSLOT
#define GONE(k) (wst[S(k,0)]==0)                    /* the first worker speaks for all */
#else
#define GONE(k) (NINST(k)==0)
#endif
#define WANTGONE(c,k) (up[c]==2 && con[c] && want[X(c,k)]==0 && qp[X(c,k)]==0 && GONE(k))
#if EV == 6
#define DRAIN(c,k) \
   :: d_step{ WANTGONE(c,k) && rq[X(c,k)]==3 && rdy[k]!=0 -> \
        printf("c%d: drains %d to the exchange\n",c,rdy[k]); orph=orph|rdy[k]; rdy[k]=0 }
#define REACT(k) false
#elif defined(NOREACT)
#define DRAIN(c,k)
#define REACT(k) false
#else
#define DRAIN(c,k)
#define REACT(k) (rdy[k]!=0 && !qdown[k])
#endif
#define MAYBIND(c,k) (up[c]==2 && want[X(c,k)]==1 && (rq[X(c,k)]==1||rq[X(c,k)]==3) && qp[X(c,k)]==0 && BINDOK(c,k))
/* A declaration goes over a channel of its own and is carried out at any later time, whatever became of the token and
 * of the controller that sent it. ASIDEBINDS: what is declared so is bound at once, by the same command. */
#ifdef ASIDEBINDS
#define LANDS(k) qx[k]=1; qb[k]=1
#define LANDED 2
#else
#define LANDS(k) qx[k]=1
#define LANDED 1
#endif
#ifdef DECLASIDE
#define DECLARE(c,k) \
   :: d_step{ up[c]==2 && con[c] && want[X(c,k)]==1 && rq[X(c,k)]==0 && qp[X(c,k)]==0 && !dp[X(c,k)] -> \
        printf("c%d: sends the declaration of queue %d over another channel\n",c,k); dp[X(c,k)]=1 } \
   :: d_step{ dp[X(c,k)] -> \
        printf("c%d: queue %d is declared (exists=%d connected=%d)\n",c,k,qx[k],con[c]); dp[X(c,k)]=0; LANDS(k); \
        if :: up[c]==2 && con[c] && rq[X(c,k)]==0 -> rq[X(c,k)]=LANDED :: else fi }
#define DECLARELATE(k) \
   :: d_step{ dlate[k]>0 -> printf("late declaration of queue %d (exists=%d)\n",k,qx[k]); dlate[k]--; LANDS(k) }
#define FORGETDECL(c,k) dlate[k]=dlate[k]+dp[X(c,k)]; dp[X(c,k)]=0;
#define DECLARING(c,k) dp[X(c,k)]
#else
#define DECLARE(c,k) \
   :: d_step{ up[c]==2 && FENCE(c) && want[X(c,k)]==1 && rq[X(c,k)]==0 && qp[X(c,k)]==0 -> \
        printf("c%d: declares queue %d\n",c,k); qx[k]=1; rq[X(c,k)]=1 }
#define DECLARELATE(k)
#define FORGETDECL(c,k)
#define DECLARING(c,k) false
#endif
#define QUEUES(c,k) \
   DECLARE(c,k) \
   :: d_step{ MAYBIND(c,k) && FENCE(c) -> \
        printf("c%d: binds queue %d (exists=%d)\n",c,k,qx[k]); \
        if :: qx[k] -> qb[k]=1; rq[X(c,k)]=2 :: else -> LOSECON(c) fi } \
   :: d_step{ cc>0 && con[c] && MAYBIND(c,k) && qx[k] -> \
        printf("c%d: binds queue %d, the answer is lost with the connection\n",c,k); cc--; qb[k]=1; LOSECON(c) } \
   :: d_step{ up[c]==2 && FENCE(c) && UNBINDWHEN(c,k) && qp[X(c,k)]==0 -> \
        printf("c%d: sends unbind %d\n",c,k); rq[X(c,k)]=1; qp[X(c,k)]=1 }      /* "bound" is withdrawn first */ \
   :: d_step{ SENT(c) && qp[X(c,k)]==1 -> \
        printf("c%d: unbind-ok %d\n",c,k); qb[k]=0; qp[X(c,k)]=0; \
        if :: up[c]==2 && rq[X(c,k)]==1 -> rq[X(c,k)]=3 :: else fi } \
   DRAIN(c,k) \
   :: d_step{ WANTGONE(c,k) && CHECKWHEN(c,k) && qx[k] && EVIDENCE(k) -> \
        printf("c%d: key %d: workers gone, evidence ok, sends delete\n",c,k); qp[X(c,k)]=2 } \
   :: d_step{ WANTGONE(c,k) && CHECKWHEN(c,k) && REACT(k) -> \
        printf("c%d: key %d still has messages: active again\n",c,k); want[X(c,k)]=1 } \
   :: d_step{ up[c]==2 && con[c] && rq[X(c,k)]>0 && qp[X(c,k)]==0 && !qx[k] && want[X(c,k)]==0 -> \
        printf("c%d: queue %d is gone already\n",c,k); rq[X(c,k)]=0 } \
   :: d_step{ SENT(c) && qp[X(c,k)]==2 -> \
        printf("c%d: queue %d DELETED (bound=%d ready=%d held=%d/%d under way=%d)\n",c,k,qb[k],rdy[k],HELD(k),gh[k],tq[k]); \
        qp[X(c,k)]=0; rq[X(c,k)]=0; DODELETE(k) }

/* ------------------------------------------- worker groups loop and driver (osrdyne/pool/workers/loop.py, plan_group) */
#ifdef NONUNIQUE
#define MISSING(k) (NINST(k)==0 -> 1 : 0)
#elif SLOTS == 2 && !defined(ALLSLOTS)
#define MISSING(k) ((wst[S(k,0)]==0) | ((wst[S(k,1)]==0)<<1))
#elif SLOTS == 2
#define MISSING(k) (NINST(k)==0 -> 3 : 0)           /* starts per group and not per slot */
#else
#define MISSING(k) (wst[S(k,0)]==0)
#endif
#ifdef EDGE
#define WANTSTART(c,k) (!est[X(c,k)])
#define NOTESTART(c,k) est[X(c,k)]=1
#define NOTESTOP(c,k)  est[X(c,k)]=0
#define NOROOM(c,k)
#elif defined(ADMEDGE)
#define WANTSTART(c,k) (MISSING(k)!=0 && !est[X(c,k)])
#define NOTESTART(c,k)
#define NOTESTOP(c,k)
#define NOROOM(c,k) \
   :: d_step{ MAYSTART(c,k) && MISSING(k)!=0 && !ROOM(c,k) && !est[X(c,k)] -> \
        printf("c%d: no room for key %d, it is not looked at again\n",c,k); est[X(c,k)]=1 }
#else
#define WANTSTART(c,k) (MISSING(k)!=0)
#define NOTESTART(c,k)
#define NOTESTOP(c,k)
#define NOROOM(c,k)
#endif
#ifdef LISTONLY
#define KNOWN(c,k) (rq[X(c,k)]>0)
#else
#define KNOWN(c,k) true
#endif
#ifdef P4
#define CHECKBUSY(c,s) if :: tok==c+1 && con[c] && wheld[s]!=0 -> FAIL(BUSY_STOPPED) :: else fi;
#else
#define CHECKBUSY(c,s)
#endif
#ifdef P8
#define CHECKROOM(k) if :: NINST(OTHER(k))>0 -> FAIL(NO_ROOM) :: else fi;
#else
#define CHECKROOM(k)
#endif
#ifdef STARTACTIVE
#define STARTS(c,k) (want[X(c,k)]==1)     /* never for an Unbound group; the code does while its end is not looked into */
#else
#define STARTS(c,k) (want[X(c,k)]!=0)
#endif
#define MAYSTART(c,k) (up[c]==2 && DRVOK(c) && wp[X(c,k)]==0 && STARTS(c,k) && rq[X(c,k)]>0 && !FAILED(c,k))
#define GROUPS(c,k) \
   :: d_step{ MAYSTART(c,k) && WANTSTART(c,k) && ROOM(c,k) -> \
        printf("c%d: key %d: decides to start (listed=%d)\n",c,k,NINST(k)); wp[X(c,k)]=MISSING(k); NOTESTART(c,k) } \
   :: d_step{ up[c]==2 && DRVOK(c) && wp[X(c,k)]==0 && want[X(c,k)]==0 && KNOWN(c,k) && STOPPABLE(k)!=0 -> \
        printf("c%d: key %d: decides to stop\n",c,k); wp[X(c,k)]=STOPPABLE(k)<<2; NOTESTOP(c,k) } \
   NOROOM(c,k) SURPLUS(c,k) EACHPLACE(DRIVER,c,k)
#define DRIVER(c,k,j) \
   :: d_step{ (wp[X(c,k)] & STARTOF(j)) -> \
        printf("driver: start of key %d slot %d by c%d\n",k,j,c); \
        wp[X(c,k)]=wp[X(c,k)]-STARTOF(j); CHECKROOM(k) DOSTART(k,j) } \
   STARTFAILS(c,k,j) \
   :: d_step{ (wp[X(c,k)] & STOPOF(j)) -> \
        printf("driver: stop of key %d slot %d by c%d (holds %d)\n",k,j,c,wheld[S(k,j)]-1); \
        wp[X(c,k)]=wp[X(c,k)]-STOPOF(j); \
        if :: wst[S(k,j)]==RUN -> CHECKBUSY(c,S(k,j)) wst[S(k,j)]=STOPPING; wcon[S(k,j)]=0 \
           :: wst[S(k,j)]==CUT -> wst[S(k,j)]=0 :: else fi }
#ifdef NONUNIQUE
#define DOSTART(k,j) if :: wst[S(k,0)]==0 -> wst[S(k,0)]=RUN \
                        :: else -> if :: wst[S(k,1)]==0 -> wst[S(k,1)]=RUN :: else fi fi
#else
#define DOSTART(k,j) if :: wst[S(k,j)]==0 -> wst[S(k,j)]=RUN :: else fi     /* unique name: a second one is refused */
#endif
#ifdef DUPFIX
#define SURPLUS(c,k) \
   :: d_step{ up[c]==2 && con[c] && wp[X(c,k)]==0 && want[X(c,k)]!=0 && NINST(k)==2 && wst[S(k,1)]!=STOPPING -> \
        printf("c%d: surplus worker %d\n",c,S(k,1)); wp[X(c,k)]=STOPOF(1) }
#else
#define SURPLUS(c,k)
#endif

/* ------------------------------------------- start failures (osrdyne/pool/state/restart_backoff.py, processors/start_failures) */
#if SF > 0
#define STARTFAILS(c,k,j) \
   :: d_step{ sfl>0 && (wp[X(c,k)] & STARTOF(j)) && wst[S(k,j)]==0 -> \
        printf("driver: start of key %d slot %d by c%d fails for good\n",k,j,c); sfl--; wp[X(c,k)]=wp[X(c,k)]-STARTOF(j); \
        if :: up[c]==2 -> failed[X(c,k)]=1 :: else fi }
#define GIVEBACK(c,k) BACK(k,H(fheld[X(c,k)])) fheld[X(c,k)]=0; fcon[X(c,k)]=0;
#define LOSEFAILED(c,k) GIVEBACK(c,k)
#define FORGETFAILED(c,k) failed[X(c,k)]=0; fmem[X(c,k)]=0;
#ifdef SFSTAY
#define ENDSERVE(c,k) BACK(k,H(fheld[X(c,k)])) fheld[X(c,k)]=0;    /* the request goes back, the consumer stays */
#define DETACHWHEN(c,k) false
#elif defined(SFKEEP)
#define ENDSERVE(c,k) GIVEBACK(c,k)
#define DETACHWHEN(c,k) (NINST(k)>0)                                /* not detached when the group ends */
#else
#define ENDSERVE(c,k) GIVEBACK(c,k)
#define DETACHWHEN(c,k) (!failed[X(c,k)] || NINST(k)>0)
#endif
#ifdef SFACKFIRST
#define ANSWER(c,k) \
   :: d_step{ con[c] && failed[X(c,k)] && fheld[X(c,k)]!=0 && fmem[X(c,k)]==0 -> \
        printf("c%d: acks %d first\n",c,fheld[X(c,k)]-1); fmem[X(c,k)]=fheld[X(c,k)]; fheld[X(c,k)]=0 } \
   :: d_step{ con[c] && fmem[X(c,k)]!=0 -> \
        printf("c%d: answers %d start-failed\n",c,fmem[X(c,k)]-1); rep=rep|H(fmem[X(c,k)]); fmem[X(c,k)]=0 }
#else
#define ANSWER(c,k) \
   :: d_step{ con[c] && failed[X(c,k)] && fheld[X(c,k)]!=0 && !(rep & H(fheld[X(c,k)])) -> \
        printf("c%d: answers %d start-failed\n",c,fheld[X(c,k)]-1); rep=rep|H(fheld[X(c,k)]) } \
   :: d_step{ con[c] && fheld[X(c,k)]!=0 && (rep & H(fheld[X(c,k)])) -> \
        printf("c%d: acks %d\n",c,fheld[X(c,k)]-1); fheld[X(c,k)]=0 }
#endif
#define STARTFAILURES(c,k) \
   :: d_step{ up[c]==2 && con[c] && failed[X(c,k)] && !fcon[X(c,k)] && rq[X(c,k)]>0 && qx[k] && !qdown[k] && \
              NINST(k)==0 && wp[X(c,k)]==0 -> \
        printf("c%d: consumes the queue of the failed key %d\n",c,k); fcon[X(c,k)]=1 } \
   ANSWER(c,k) \
   :: d_step{ up[c]==2 && con[c] && failed[X(c,k)] && fheld[X(c,k)]!=0 && !(rep & H(fheld[X(c,k)])) -> \
        printf("c%d: %d comes after the back-off: next attempt for key %d\n",c,fheld[X(c,k)]-1,k); \
        failed[X(c,k)]=0; ENDSERVE(c,k) } \
   :: d_step{ con[c] && fcon[X(c,k)] && DETACHWHEN(c,k) -> \
        printf("c%d: leaves the queue of key %d\n",c,k); GIVEBACK(c,k) } \
   :: d_step{ up[c]==2 && failed[X(c,k)] && want[X(c,k)]==0 -> \
        printf("c%d: forgets the failure of key %d\n",c,k); failed[X(c,k)]=0 }
#define TAKEFAILED(r,k,c) \
   :: d_step{ (rdy[k] & B(r)) && !qdown[k] && con[c] && fcon[X(c,k)] && fheld[X(c,k)]==0 -> \
        printf("deliver %d to the start failure responder of c%d\n",r,c); rdy[k]=rdy[k]-B(r); fheld[X(c,k)]=r+1 }
#else
#define STARTFAILS(c,k,j)
#define STARTFAILURES(c,k)
#define TAKEFAILED(r,k,c)
#define LOSEFAILED(c,k)
#define FORGETFAILED(c,k)
#endif

/* ----------------------------------------------------------------- forwarder (osrdyne/processors/requests/forwarder.py) */
#ifdef FWDDEFAULT
#define FORWARD(c,r,k) if :: qx[k] -> tq[k]=tq[k]|B(r); op[c]=3 :: else -> op[c]=1 fi       /* returned: try again */
#else
#define FORWARD(c,r,k) if :: qb[k] -> tq[k]=tq[k]|B(r) :: else -> orph=orph|B(r) fi; op[c]=3
#endif
#ifdef ACKFIRST
#define FORWARDING(c,r,k) \
   :: d_step{ up[c]==2 && con[c] && op[c]==2 && oid[c]==r && rq[X(c,k)]==2 -> \
        printf("c%d: acks orphan %d first\n",c,r); oh[c]=0; op[c]=4 } \
   :: d_step{ up[c]==2 && con[c] && op[c]==4 && oid[c]==r -> \
        printf("c%d: then forwards %d\n",c,r); FORWARD(c,r,k); op[c]=0; oid[c]=0 }
#else
#define FORWARDING(c,r,k) \
   :: d_step{ up[c]==2 && op[c]==2 && oid[c]==r && rq[X(c,k)]==2 -> printf("c%d: sees key %d bound\n",c,k); op[c]=4 } \
   :: d_step{ up[c]==2 && con[c] && op[c]==4 && oid[c]==r -> \
        printf("c%d: forwards orphan %d (bound=%d)\n",c,r,qb[k]); FORWARD(c,r,k) } \
   :: d_step{ up[c]==2 && con[c] && op[c]==3 && oid[c]==r && !(tq[k] & B(r)) -> \
        printf("c%d: forward of %d confirmed, acks the orphan\n",c,r); oh[c]=0; op[c]=0; oid[c]=0 }
#endif
#ifdef REREQ
#define REREQUIRE(c,r,k) \
   :: d_step{ up[c]==2 && op[c]==2 && oid[c]==r && want[X(c,k)]!=1 -> \
        printf("c%d: orphan %d still waits: requires key %d again\n",c,r,k); want[X(c,k)]=1 }
#else
#define REREQUIRE(c,r,k)
#endif
#define ORPHAN(c,r,k) \
   :: d_step{ up[c]==2 && con[c] && op[c]==0 && (orph & B(r)) -> \
        printf("c%d: takes orphan %d\n",c,r); orph=orph-B(r); oh[c]=r+1; oid[c]=r; op[c]=1 } \
   :: d_step{ up[c]==2 && op[c]==1 && oid[c]==r -> printf("c%d: requires key %d\n",c,k); want[X(c,k)]=1; op[c]=2 } \
   REREQUIRE(c,r,k) \
   FORWARDING(c,r,k)

/* ------------------------------------------------- leadership and seeding (osrdyne/daemon/term.py, osrdyne/pool/queues/resync.py) */
#if TDEL > 0
#define NOTICED(c) gone[c]=0;
#define DELETETOKEN(c) \
   :: d_step{ tdl>0 && tok==c+1 && con[c] && up[c]==2 -> \
        printf("the leader queue is deleted; c%d does not know\n",c); tdl--; tok=0; gone[c]=1 } \
   :: d_step{ gone[c] && con[c] -> \
        printf("c%d hears that its consumer is cancelled, closes the connection\n",c); LOSECON(c) }
#else
#define NOTICED(c)
#define DELETETOKEN(c)
#endif
#define LOSECON(c) con[c]=0; NOTICED(c) if :: tok==c+1 -> tok=0 :: else fi; orph=orph|H(oh[c]); oh[c]=0; FORALLK(LOSEFAILED2,c)
#define LOSEFAILED2(c,k) LOSEFAILED(c,k)
#ifdef KEEPSTATE
#define FORGET(c,k)
#define ADOPT(c,k)
#else
#ifdef OTHERCH
#define FORGET(c,k) want[X(c,k)]=0; rq[X(c,k)]=0; est[X(c,k)]=0; FORGETFAILED(c,k) FORGETPLACE(c,k) \
                    FORGETDECL(c,k)
#else
#define FORGET(c,k) want[X(c,k)]=0; rq[X(c,k)]=0; est[X(c,k)]=0; qp[X(c,k)]=0; FORGETFAILED(c,k) \
                    FORGETPLACE(c,k) FORGETDECL(c,k)
#endif
#ifdef PRELIST
#define ADOPT(c,k) rq[X(c,k)]=pre[X(c,k)]; want[X(c,k)]=(pre[X(c,k)]==2 -> 1 : (pre[X(c,k)]==1 -> 2 : 0)); pre[X(c,k)]=0;
#elif defined(MISSLIST)
#define ADOPT(c,k) rq[X(c,k)]=0; want[X(c,k)]=0;
#elif defined(ADOPTACT)
#define ADOPT(c,k) rq[X(c,k)]=qx[k]; want[X(c,k)]=qx[k];
#else
#define ADOPT(c,k) rq[X(c,k)]=qx[k]; want[X(c,k)]=((qb[k] || rdy[k]!=0) -> 1 : (qx[k] -> 2 : 0));  /* binding unknown */
#endif
#endif
#ifdef PRELIST
#define PRE1(c,k) pre[X(c,k)]=qx[k]+qb[k];
#define LEADPRE(c) \
   :: d_step{ up[c]==1 && con[c] && !prev[c] -> printf("c%d: standby lists queues\n",c); prev[c]=1; FORALLK(PRE1,c) }
#define PREOK(c) prev[c]
#define PRECLR(c) prev[c]=0
#else
#define LEADPRE(c)
#define PREOK(c) true
#define PRECLR(c)
#endif
#ifdef RESYNC
#define RESYNC1(c,k) \
   :: d_step{ up[c]==2 && con[c] && qx[k] && rq[X(c,k)]==0 && qp[X(c,k)]==0 && want[X(c,k)]==0 && !DECLARING(c,k) -> \
        printf("c%d: resync finds queue %d\n",c,k); rq[X(c,k)]=1; want[X(c,k)]=1 }
#define FORALLR(c) FORALLK(RESYNC1,c)
#else
#define FORALLR(c)
#endif
#define LEADER(c) \
   LEADPRE(c) \
   DELETETOKEN(c) \
   FORALLR(c) \
   :: d_step{ up[c]==1 && con[c] && MAYLEAD(c) && PREOK(c) -> \
        printf("c%d: gets the token, lists queues (exists=%d bound=%d)\n",c,qx[0],qb[0]); \
        tok=c+1; up[c]=2; FORALLK(ADOPT,c) PRECLR(c) } \
   :: d_step{ cc>0 && con[c] && up[c]==2 -> \
        printf("c%d: connection cut; the broker frees the token (c%d has not noticed)\n",c,c); cc--; LOSECON(c) } \
   :: d_step{ !con[c] -> \
        printf("c%d: notices, connects again as standby\n",c); con[c]=1; up[c]=1; op[c]=0; oid[c]=0; FORALLK(FORGET,c) }

/* -------------------------------------------------------------------------------------------------- the end, and all */
#define LEADS(c) (tok==c+1 && con[c] && up[c]==2)
#define SERVED(c,k) (qx[k] && qb[k] && (NINST(k)==SLOTS || FAILED(c,k)))
#define ENDK(c,k) (want[X(c,k)]==1 -> SERVED(c,k) : (want[X(c,k)]==0 && !qx[k] && NINST(k)==0))
#if NKEY == 2
#define ENDALL(c) (LEADS(c) && ENDK(c,0) && ENDK(c,1))
#else
#define ENDALL(c) (LEADS(c) && ENDK(c,0))
#endif

#define REQ(r) REQKEY(r,KEYOF(r))
#define REQKEY(r,k) CLIENT(r,k) ENQ(r,k) GHOST(r,k) EXPIRE(r,k) RELEASE(r,k) ORPHAN(0,r,k) ORPHAN(1,r,k) \
   TAKEFAILED(r,k,0) TAKEFAILED(r,k,1) EACHPLACE(TAKES,r,k)
#define TAKES(r,k,j) DELIVER(r,k,S(k,j))
#define WORKS(_,k,j) WORKER(S(k,j),k)
#define CONTROLLER(c,k) TRACKER(c,k) QUEUES(c,k) GROUPS(c,k) STARTFAILURES(c,k)
#define KEY(k) EACHPLACE(WORKS,_,k) RABBITMQ(k) DECLARELATE(k) CONTROLLER(0,k) CONTROLLER(1,k)

init {
  d_step { con[0]=1; con[1]=1; up[0]=1; up[1]=1 }
  do
  :: d_step{ !SAFE_NOW -> printf("LOST conf=%d rep=%d\n", conf, rep); FAIL(LOST) }
  REQ(0)
#if NREQ > 1
  REQ(1)
#endif
#if NREQ > 2
  REQ(2)
#endif
  KEY(0)
#if NKEY == 2
  KEY(1)
#endif
  LEADER(0) LEADER(1)
  :: d_step{ cc>0 -> cc=0 } :: d_step{ wcr>0 -> wcr=0 } :: d_step{ ret>0 -> ret=0 } :: d_step{ ttl>0 -> ttl=0 }
  :: d_step{ qdn>0 -> qdn=0 } :: d_step{ sfl>0 -> sfl=0 }
#if TDEL > 0
  :: d_step{ tdl>0 -> tdl=0 }
#endif
  :: else ->
     d_step {
#ifndef ONLYLOSS
       if :: !(rep==ALL && conf==ALL) -> FAIL(NO_OUTCOME) :: else fi;
       if :: !(ENDALL(0) || ENDALL(1)) -> FAIL(WRONG_END) :: else fi;
#endif
       skip
     }
     break
  od
}
